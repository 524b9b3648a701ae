"""Trains one CLIP model, or under -m every cell of a sweep.

    python -m experiments.train model=nano optimizer=stable_adamw num_steps=200
    python -m experiments.train -m experiment=loss_curves_demo

The same command again resumes; a finished run says so and exits 0.
"""

import json
import os
import sys
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from experiments import cli
from experiments.open_data import Data, open_data, progress_bar
from experiments.preflight import preflight
from lowprec.config import Config
from lowprec.environment import environment
from lowprec.record import Record, RunBusyError, write_atomically
from lowprec.run import directory, label, read_status, to_dict
from lowprec.validate import ConfigError

STOPPED = 75  # exit status of a run that was asked to stop: the same command resumes it


def main(config: Config) -> None:
    """One run from its config to its end."""
    preflight(config)
    data = open_data(config)
    run = directory(config, _sources(config, data))
    status = read_status(run) if (run / "status.json").exists() else {"state": None, "step": 0}
    done = status["state"] == "finished" and status["step"] >= config.num_steps
    if done or status["state"] == "diverged":
        print(f"{run} is {status['state']} at step {status['step']}; nothing to do")
        return
    try:
        record = Record(run)
    except RunBusyError as error:
        raise cli.RunError(str(error)) from error
    try:
        ended = _attempt(config, data, record)
    except BaseException as error:
        step = read_status(run)["step"] if (run / "status.json").exists() else 0
        interrupted = isinstance(error, KeyboardInterrupt)
        state = "preempted" if interrupted else "failed"
        record.status(state, step, f"{type(error).__name__}: {error}"[:500])
        if interrupted:
            sys.exit(STOPPED)
        raise
    finally:
        record.close()
    print(f"{run} {ended.state} at step {ended.step}" + (f": {ended.reason}" * bool(ended.reason)))
    if ended.state == "preempted":
        sys.exit(STOPPED)
    if ended.state == "failed":
        raise cli.RunError(f"{run} failed")


def _sources(config: Config, data: Data) -> dict[str, str]:
    """Digests of what the config's paths hold."""
    sources = {"data": data.digest(config)}
    if config.model.init_from:
        from lowprec.clip.export import weights_digest

        try:
            sources["init_from"] = weights_digest(Path(config.model.init_from))
        except FileNotFoundError as error:
            raise ConfigError([f"model.init_from={config.model.init_from}: {error}"]) from error
    return sources


def _attempt(config: Config, data: Data, record: Record) -> object:
    """Trains until the run ends or is stopped; torch is loaded here."""
    from experiments.build import build
    from lowprec.train.loggers import build_logger
    from lowprec.train.loop import train
    from lowprec.train.signals import stop_request

    plain, facts = to_dict(config), environment()
    write_atomically(record.run / "config.yaml", OmegaConf.to_yaml(plain))
    write_atomically(record.run / "environment.json", json.dumps(facts, indent=1) + "\n")
    record.append("attempts", [{"attempt": record.attempt, "pid": os.getpid(), **facts}])
    before = read_status(record.run)["step"] if (record.run / "status.json").exists() else 0
    record.status("running", before)
    with Console().status(f"building {label(config)}"):
        built = build(config, data)
        evaluation = built.evaluation()
    logger = build_logger(config.logger.name, record.run, plain)
    name = label(config)
    with progress_bar() as bar, stop_request() as stop:
        first = "compiling" if config.compile else ""
        shown = bar.add_task(name, total=config.num_steps, note=first)

        def evaluate(model: object) -> dict:
            bar.update(shown, note="evaluating")
            return evaluation(model)

        def on_flush(row: dict) -> None:
            note = f"loss {row['loss']:.3f}  {row['images_per_s']:.0f} images/s"
            bar.update(shown, completed=row["step"], note=note)
            scores = [f"{key} {value:.3f}" for key, value in row.items() if "/" in key]
            if scores:
                bar.console.print(f"{name} step {row['step']}:", ", ".join(scores), soft_wrap=True)

        ended = train(
            built.task,
            built.state,
            built.batches_from,
            record,
            config,
            evaluate=evaluate if evaluation else None,
            logger=logger,
            stop=stop,
            on_flush=on_flush,
        )
    logger.close()
    record.finish_stream()
    if ended.state in ("finished", "diverged"):
        record.write_parquet()
    record.status(ended.state, ended.step, ended.reason)
    return ended


if __name__ == "__main__":
    cli.main(main, "train", preflight=preflight)
