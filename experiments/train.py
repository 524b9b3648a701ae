"""Trains one CLIP model, or under -m every cell of a sweep.

    python -m experiments.train model=nano optimizer=stable_adamw num_steps=200
    python -m experiments.train -m experiment=loss_curves_demo
    torchrun --nproc_per_node 8 -m experiments.train distributed=ddp model=vit_b32

The same command again resumes; a finished run says so and exits 0.
"""

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import OmegaConf
from rich.console import Console

from experiments.entry import run_command
from lowprec.config.check import RunError
from lowprec.config.patterns import without_secrets
from lowprec.config.place import place
from lowprec.config.preflight import preflight
from lowprec.config.schema import Config
from lowprec.data.open import Data, open_data, progress_bar
from lowprec.runs import durable
from lowprec.runs.attempts import STOPPED, first_step
from lowprec.runs.environment import environment
from lowprec.runs.identity import directory, identity, label, to_dict
from lowprec.runs.record import NullRecord, Record, RecordError, RunBusyError
from lowprec.train.remote import NoCopy
from lowprec.train.signals import StopRequest, stop_request
from lowprec.train.sources import source_of_weights, sources_of

if TYPE_CHECKING:  # torch is loaded once the command has been checked
    from lowprec.train.distributed import Ranks


def main(config: Config, expected: str | None = None) -> None:
    """One run from its config to its end, in one process or as one of several.

    `expected`: the run directory that a sweep has planned; other data, which would make another
    run, are refused.
    """
    sys.stderr = sys.__stderr__  # see the end of this file
    preflight(config)
    from lowprec.train.distributed import Ranks, join

    if place()[1] == 1:
        _run(config, Ranks(), expected)
        return
    world = join(config.device, config.distributed.timeout_s)
    with open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(sys.stdout if world.is_first else nowhere):
            _run(config, world, expected)


def _run(config: Config, world: "Ranks", expected: str | None) -> None:
    """A rank's part of a run; rank 0 writes, and speaks for all where all fail alike."""
    from lowprec.train.attempt import attempt, line_of
    from lowprec.train.distributed import PeerFailed

    try:
        data = _open_data(config, world)
        sources = world.first(lambda: sources_of(config, data))
        run = directory(config, sources)
        if expected not in (None, str(run)):
            raise RunError(f"{expected}: its data have changed since `submit`; now it is {run}")
        record = _open_record(run, config.num_steps, world)
        if record is None:
            return
        try:
            with stop_request() as stop:
                ended = attempt(
                    lambda copy: _train(config, data, sources, record, stop, copy, world),
                    config,
                    record,
                    world,
                )
        finally:
            record.close()
    except PeerFailed:
        time.sleep(1)  # the rank that failed says why, before torchrun ends all for this exit
        sys.exit(1)
    skipped, line = record.count("skips"), line_of(ended, record)
    if ended.state == "failed":
        raise RunError(line) if world.is_first else SystemExit(1)
    print(line + (f"; {skipped} samples could not be read (skips.jsonl)" * bool(skipped)))
    if ended.state == "preempted":
        sys.exit(STOPPED)


def _open_data(config: Config, world: "Ranks") -> Data:
    """Rank 0 goes first: it renders and indexes what is not there yet."""
    opened: list[Data] = []
    world.first(lambda: opened.append(open_data(config)))
    return opened[0] if opened else open_data(config)


def _open_record(run: Path, num_steps: int, world: "Ranks") -> Record | None:
    """The record of a run, which rank 0 alone can write; None if there is nothing to do."""
    opened: list[Record] = []

    def open_first() -> int | None:
        try:
            record = Record(run)
        except (RunBusyError, RecordError) as error:
            raise RunError(str(error)) from error
        status = record.last_status()
        done = status["state"] == "finished" and status["step"] >= num_steps
        if done or status["state"] == "diverged":
            print(f"{run} is {status['state']} at step {status['step']}; nothing to do")
            record.close()
            return None
        opened.append(record)
        return record.attempt

    attempt = world.first(open_first)
    if attempt is None:
        return None
    return opened[0] if opened else NullRecord(run, attempt)


def _train(
    config: Config,
    data: Data,
    sources: dict[str, str],
    record: Record,
    stop: StopRequest,
    copy: NoCopy,
    world: "Ranks",
) -> tuple[object, object]:
    """Trains until the run ends or is stopped: how, and the logger; torch is loaded here."""
    from lowprec.runs.provenance import code_digests
    from lowprec.train.build import build
    from lowprec.train.checkpoint import list_checkpoints
    from lowprec.train.loggers import build_logger
    from lowprec.train.loop import train

    plain = to_dict(config)
    plain["data"]["train"] = without_secrets(config.data.train)  # a signed URL is a secret
    world.first(lambda: _begin_record(config, plain, sources, record, world))
    with Console().status(f"building {label(config)}"):
        built = world.together(lambda: build(config, data, world))
        evaluation = built.evaluation()
    if world.is_first:
        _report_layers(config, built.layers, record)
    if config.resume.from_ and not list_checkpoints(record.run):
        source = Path(world.first(lambda: source_of_weights(config, sources)))
        world.together(lambda: built.state.load(source, fresh=True))
        print(f"{record.run} begins with the weights and moments of {source}")
    logger = build_logger(config.logger.name if world.is_first else "none", record.run, plain)
    provenance = {"config": identity(config), "sources": sources, "code": code_digests()}
    provenance["layout"] = built.layout()
    with _shown(config, evaluation) as (evaluate, on_flush):
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
            on_save=copy.start,
            flops=built.flops_per_pair(),
            world=world,
        )
    world.heartbeat(None, "ending")
    record.finish_stream()
    if ended.state in ("finished", "diverged"):
        record.write_parquet()
    record.status(ended.state, ended.step, ended.reason)
    return ended, logger


@contextlib.contextmanager
def _shown(config: Config, evaluation: Callable | None) -> Iterator[tuple[Callable, Callable]]:
    """A progress bar; what evaluates, and what takes a flush, shown on it."""
    name = label(config)
    with progress_bar() as bar:
        first = "compiling" if config.compile else ""
        shown = bar.add_task(name, total=config.num_steps, note=first)

        def evaluate(model: object) -> dict:
            bar.update(shown, note="evaluating")
            return evaluation(model)

        def on_flush(row: dict) -> None:
            note = f"loss {row['loss']:.3f}  {row['images_per_s']:.0f} images/s"
            note += f"  MFU {row['mfu']:.0%}" if row["mfu"] else ""
            note += f"  {row['memory_gib']:.0f} GiB" if row["memory_gib"] else ""
            bar.update(shown, completed=row["step"], note=note)
            scores = [f"{key} {value:.3f}" for key, value in row.items() if "/" in key]
            if scores:
                bar.console.print(f"{name} step {row['step']}:", ", ".join(scores), soft_wrap=True)

        yield evaluate, on_flush


def _begin_record(
    config: Config, plain: dict, sources: dict[str, str], record: Record, world: "Ranks"
) -> None:
    """Writes what the attempt is: its config, the machine, what has changed since the last."""
    from lowprec.runs.provenance import changes_since

    begins = first_step(record.run)
    facts = environment()
    changed = changes_since(record.run, facts)
    for line in changed:
        print(f"note: since the last attempt {line}")
    durable.replace(record.run / "config.yaml", OmegaConf.to_yaml(plain).encode())
    durable.replace(record.run / "environment.json", json.dumps(facts, indent=1).encode())
    started = {"attempt": record.attempt, "pid": os.getpid(), "changed": changed}
    started |= {"deterministic": config.deterministic, "sources": sources, **facts}
    record.append("attempts", [started | begins | {"processes": world.size}])
    record.status("running")


def _report_layers(config: Config, layers: list, record: Record) -> None:
    """Writes what the recipe made of each linear layer, and says it in a line."""
    from lowprec.nn.replace import summary

    if config.precision.recipe == "high":
        return
    rows = [dataclasses.asdict(layer) for layer in layers]
    durable.replace(record.run / "layers.json", json.dumps(rows, indent=1).encode())
    print(summary(config.precision.recipe, layers))


if __name__ == "__main__":
    if place()[2]:  # one rank of a machine says what is wrong with a command
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for as long as main is not reached)
    run_command(main, "train", preflight=preflight)
