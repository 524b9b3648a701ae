"""Trains a config into its run directory: `train_run(config)` does a whole run, in eight calls.

1. `open_data(config)` finds the shards, and renders or indexes what is missing.
2. `sources_of(config, data)` takes digests of what the config's paths hold.
3. `directory(config, sources)` names the run by its config and these digests.
4. `Record(run)` locks the run directory; a run that has ended is left alone.
5. `watched(config, record, world)` ends all ranks if one fails or hangs, until the run ends.
6. `build(config, data, world)` makes the model, its layers by the recipe, optimizer and scaler.
7. `train(built, record)` restores the newest checkpoint, then steps, records, evaluates and saves.
8. `keep_weights(run)` reduces a finished run to its newest weights, unless the config keeps more.
"""

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf

from lowprec.config.check import ConfigError, RunError, retired_faults
from lowprec.config.schema import Config
from lowprec.data.open import Data, open_data
from lowprec.data.sources import without_secrets
from lowprec.data.workers import ignored_child_signals
from lowprec.diagnostics.spikes import protocol_of
from lowprec.optim.muon import MuonAdamW
from lowprec.runs import durable
from lowprec.runs.attempts import first_step
from lowprec.runs.environment import environment
from lowprec.runs.identity import directory, identity
from lowprec.runs.provenance import changes_since, code_digests
from lowprec.runs.read import RecordFileError, read_last_row
from lowprec.runs.record import NullRecord, Record
from lowprec.train.build import Built, build, emulated, is_slow, pick_device
from lowprec.train.checkpoint import keep_weights
from lowprec.train.distributed import PeerFailed, Ranks
from lowprec.train.failures import fail, watched
from lowprec.train.loggers import Logger
from lowprec.train.loop import Progress, train
from lowprec.train.metrics import Ended
from lowprec.train.signals import StopRequest, stop_request
from lowprec.train.source_digests import sources_of


def train_run(
    config: Config,
    world: Ranks | None = None,
    progress: Progress | None = None,
    expected: str | None = None,
    build_objects: Callable[[Config, Data, Ranks], Built] | None = None,
) -> Ended | None:
    """Trains a checked config into its run directory, from its newest checkpoint if it has one.

    All ranks call it; rank 0 writes the record and the console. A run that diverges is a result,
    not an error. `world` is this process alone by default. `expected` is the run directory that a
    sweep has planned: changed data would name another run. `build_objects` is called instead of
    `build`. Returns how the attempt ended: finished, diverged or preempted; None if the run had
    ended before.

    Raises ConfigError for settings that were removed, or if the data or the model reveal a fault in
    the config, RunError if the run cannot continue (the message says what the user can do), and
    PeerFailed if another rank failed, which reports why.
    """
    if faults := retired_faults(config):
        raise ConfigError(faults)
    world, progress = world or Ranks(), progress or Progress()
    pick_device(config.device)  # before data are opened, and a record is begun
    opened: list[Data] = []  # in rank 0 first, which renders and indexes what is missing
    world.first(lambda: opened.append(open_data(config)))
    data = opened[0] if opened else open_data(config)
    sources = world.first(lambda: sources_of(config, data))
    run = directory(config, sources)
    if expected not in (None, str(run)):
        raise RunError(f"{expected}: its data have changed since `submit`, so it is now {run}")
    record = _open_record(run, config, world, progress)
    if record is None:
        return None
    with stop_request() as stop, contextlib.closing(record):
        try:
            with contextlib.closing(progress), watched(config, record, world):
                ended, logger = _attempt(
                    config, data, sources, record, stop, world, progress, build_objects or build
                )
        except BaseException as error:
            with ignored_child_signals():  # a broken pipe is often noticed before them
                fail(error, config, record, world)
        ended.stop_requested = stop.number is not None
        reason = f": {ended.reason}" if ended.reason else ""
        how = "interrupted" if ended.state == "preempted" else ended.state
        line = f"{run} {how} at step {ended.step}{reason}"
        if ended.state != "failed":
            skips = record.count("skips")
            print(line + f"; {skips} samples could not be read (skips.jsonl)" * bool(skips))
        is_whole = config.keep_checkpoints or config.schedule.name == "constant"  # can continue
        if world.is_first and ended.state == "finished" and not is_whole:
            keep_weights(run)
        logger.close()
    if ended.state == "failed":
        raise RunError(line) if world.is_first else PeerFailed(line)
    return ended


def _open_record(run: Path, config: Config, world: Ranks, progress: Progress) -> Record | None:
    """Opens a run's record, for writing in rank 0 only.

    None if the run has ended; then its last row is reported, and only a new remark is written.
    """
    opened: list[Record] = []

    def open_first() -> int | None:
        record = Record(run)
        status = record.last_status()
        is_finished = status["state"] == "finished" and status["step"] >= config.num_steps
        if is_finished or status["state"] == "diverged":
            print(f"{run} is {status['state']} at step {status['step']}; nothing to do")
            with contextlib.suppress(FileNotFoundError, RecordFileError):
                progress.ended_before(read_last_row(run / "metrics.jsonl"))
            _write_remark(run, config.remark)
            record.close()
            return None
        opened.append(record)
        return record.attempt

    attempt_number = world.first(open_first)
    if attempt_number is None:
        return None
    return opened[0] if opened else NullRecord(run, attempt_number)


def _write_remark(run: Path, remark: str | None) -> None:
    path = run / "config.yaml"
    written = OmegaConf.load(path)
    if remark is not None and written.get("remark") != remark:
        written["remark"] = remark
        durable.replace(path, OmegaConf.to_yaml(written).encode())
        print(f"its remark is now {remark!r}")


def _attempt(
    config: Config,
    data: Data,
    sources: dict[str, str],
    record: Record,
    stop: StopRequest,
    world: Ranks,
    progress: Progress,
    build_objects: Callable[[Config, Data, Ranks], Built],
) -> tuple[Ended, Logger]:
    plain = asdict(config)
    plain["data"]["train"] = without_secrets(config.data.train)  # a signed URL is a secret
    world.first(lambda: _begin_record(config, plain, sources, record, world))
    progress.doing("building")
    built = world.together(lambda: build_objects(config, data, world))
    if is_slow(config, built.device):
        print("note: this CPU has no bf16 instructions: precision=fp32 is several times as fast")
    if config.distributed.name != "none" and world.size == 1:
        print(f"note: distributed={config.distributed.name}: one process; torchrun starts several")
    texts = [emulated(config.precision_at(s), built.device) for s in (1, config.num_steps)]
    for text in filter(None, dict.fromkeys(texts)):
        print(f"note: {text}")
    if world.is_first and built.layers.recipe != "high":
        rows = [asdict(layer) for layer in built.layers]
        durable.replace(record.run / "layers.json", json.dumps(rows, indent=1).encode())
        print(built.layers)
    optimizer = built.state.optimizer
    if world.is_first and isinstance(optimizer, MuonAdamW):
        print(optimizer.summary())
    logger = Logger(config.logger.name if world.is_first else "none", record.run, plain)
    provenance = {
        "config": identity(config),
        "sources": sources,
        "code": code_digests(),
        "layout": built.layout(),
    }
    progress.doing("compiling" if config.compile else "")
    ended = train(built, record, provenance=provenance, progress=progress, logger=logger, stop=stop)
    return ended, logger


def _begin_record(
    config: Config, plain: dict, sources: dict[str, str], record: Record, world: Ranks
) -> None:
    """Writes the config, the environment and its changes since the last attempt."""
    begins = first_step(record.run)
    facts = environment()
    changed = changes_since(record.run, facts)
    for line in changed:
        print(f"note: since the last attempt {line}")
    durable.replace(record.run / "config.yaml", OmegaConf.to_yaml(plain).encode())
    durable.replace(record.run / "environment.json", json.dumps(facts, indent=1).encode())
    started = {"attempt": record.attempt, "pid": os.getpid(), "changed": changed}
    spikes = protocol_of(warmup_steps=config.warmup_steps, **asdict(config.diagnostics.spikes))
    started |= {"spikes": asdict(spikes)}  # with the thresholds that the config leaves null
    started |= {"deterministic": config.deterministic, "sources": sources, **facts}
    record.append("attempts", [started | begins | {"processes": world.size}])
    record.status("running")
