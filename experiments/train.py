"""Trains one CLIP model, or under -m every cell of a sweep.

    python -m experiments.train model=nano optimizer=stable_adamw num_steps=200
    python -m experiments.train -m experiment=loss_curves_demo

The same command again resumes; a finished run says so and exits 0.
"""

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console

from experiments import cli
from experiments.open_data import Data, open_data, progress_bar
from experiments.preflight import preflight
from lowprec import durable
from lowprec.config import Config
from lowprec.data.urls import without_secrets
from lowprec.durable import DiskError
from lowprec.environment import environment
from lowprec.record import Record, RecordError, RunBusyError
from lowprec.run import directory, identity, label, to_dict
from lowprec.train.signals import StopRequest, stop_request
from lowprec.validate import ConfigError

STOPPED = 75  # exit status of a run that was asked to stop: the same command resumes it


def main(config: Config) -> None:
    """One run from its config to its end."""
    preflight(config)
    data = open_data(config)
    sources = sources_of(config, data)
    run = directory(config, sources)
    try:
        record = Record(run)
    except RunBusyError as error:
        raise cli.RunError(str(error)) from error
    try:
        status = record.last_status()
        done = status["state"] == "finished" and status["step"] >= config.num_steps
        if done or status["state"] == "diverged":
            print(f"{run} is {status['state']} at step {status['step']}; nothing to do")
            return
        with stop_request() as stop:
            ended = _attempt(config, data, sources, record, stop)
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = f"{type(error).__name__}: {error}"[:1000]
        with contextlib.suppress(OSError):  # the disk may be what failed
            record.status("preempted" if interrupted else "failed", reason=reason)
        if interrupted:
            saved = record.last_status()["saved"]
            print(f"{run} stopped without saving; it goes on from step {saved}")
            sys.exit(STOPPED)
        if sentence := _sentence(error, config):
            raise cli.RunError(f"{run} failed: {sentence}") from error
        raise
    finally:
        record.close()
    skipped = record.count("skips")
    line = f"{run} {ended.state} at step {ended.step}" + (f": {ended.reason}" * bool(ended.reason))
    if ended.state == "failed":
        raise cli.RunError(line)
    print(line + (f"; {skipped} samples could not be read (skips.jsonl)" * bool(skipped)))
    if ended.state == "preempted":
        sys.exit(STOPPED)


def _sentence(error: BaseException, config: Config) -> str | None:
    """What a user can do about a failure that is no defect of the code; None for any other."""
    import torch

    from lowprec.data.shards import ShardError
    from lowprec.train.state import CheckpointError

    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, (DiskError, RecordError, ShardError)):
        return f"{error}. When that is mended, the same command goes on."
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return (
            f"out of memory with model={config.model.name}, batch_size={config.batch_size} and "
            f"precision.autocast={config.precision.autocast} ({str(error)[:200]}). Less memory, "
            "as another run: checkpointing=true, model.patch_dropout=0.5 or a smaller batch_size"
        )
    lost = isinstance(error, (ConnectionError, EOFError))  # the pipe of a worker that is gone
    if lost or (isinstance(error, RuntimeError) and "DataLoader worker" in str(error)):
        return (
            f"a data worker was killed ({error}), often for want of memory: fewer num_workers need "
            "less. When that is mended, the same command goes on."
        )
    return None


def sources_of(config: Config, data: Data) -> dict[str, str]:
    """Digests of what the config's paths hold."""
    sources = {"data": data.digest(config)}
    if config.model.init_from:
        from lowprec.clip.export import weights_digest

        try:
            sources["init_from"] = weights_digest(Path(config.model.init_from))
        except FileNotFoundError as error:
            raise ConfigError([f"model.init_from={config.model.init_from}: {error}"]) from error
    return sources


def _attempt(
    config: Config, data: Data, sources: dict[str, str], record: Record, stop: StopRequest
) -> object:
    """Trains until the run ends or is stopped; torch is loaded here."""
    from experiments.build import build
    from lowprec.train.loggers import build_logger
    from lowprec.train.loop import train
    from lowprec.train.provenance import changes, code_digests

    plain, facts = to_dict(config), environment()
    plain["data"]["train"] = without_secrets(config.data.train)  # a signed URL is a secret
    changed = changes(_last_environment(record.run) or facts, facts)
    for line in changed:
        print(f"note: since the last attempt {line}")
    durable.replace(record.run / "config.yaml", OmegaConf.to_yaml(plain).encode())
    durable.replace(record.run / "environment.json", json.dumps(facts, indent=1).encode())
    started = {"attempt": record.attempt, "pid": os.getpid(), "changed": changed}
    started |= {"deterministic": config.deterministic, "sources": sources, **facts}
    record.append("attempts", [started])
    record.status("running")
    with Console().status(f"building {label(config)}"):
        built = build(config, data)
        evaluation = built.evaluation()
    _report_layers(config, built.layers, record)
    logger = build_logger(config.logger.name, record.run, plain)
    name = label(config)
    provenance = {"config": identity(config), "sources": sources, "code": code_digests()}
    provenance["layout"] = built.layout()
    with progress_bar() as bar:
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
            provenance=provenance,
            evaluate=evaluate if evaluation else None,
            logger=logger,
            stop=stop,
            on_flush=on_flush,
        )
    record.finish_stream()
    if ended.state in ("finished", "diverged"):
        record.write_parquet()
    record.status(ended.state, ended.step, ended.reason)
    logger.close()  # last: a dashboard may take a minute to end
    return ended


def _report_layers(config: Config, layers: list, record: Record) -> None:
    """Writes what the recipe made of each linear layer, and says it in a line."""
    from lowprec.nn.replace import summary

    if config.precision.recipe == "high":
        return
    rows = [dataclasses.asdict(layer) for layer in layers]
    durable.replace(record.run / "layers.json", json.dumps(rows, indent=1).encode())
    print(summary(config.precision.recipe, layers))


def _last_environment(run: Path) -> dict | None:
    """What the attempt before ran on; None if there was none or it is not known."""
    try:
        facts = json.loads((run / "environment.json").read_text())
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) else None


if __name__ == "__main__":
    cli.main(main, "train", preflight=preflight)
