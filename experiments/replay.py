"""Replays the steps around a spike of a run, unchanged and with changes.

    python -m experiments.replay run=RUN step=1170
    python -m experiments.replay run=RUN step=1170 optimizer.beta2=0.9,0.95 or skip_batches=8
    python -m experiments.replay run=RUN step=1170 change_from=1138,1154,1162 skip_batches=99

The replay starts from the newest snapshot or checkpoint at least `steps` steps before `step`, or
else from the oldest one at least 2 steps before. A finished run keeps only its last state, unless
it had keep_checkpoints=2 or more. First, the steps are replayed unchanged: this control must
reproduce the recorded losses, otherwise the exit status is 1. Then they are replayed with the
changes, which may be any keys and groups that change a run's steps: all changes between two words
`or` together, and each combination of their values. One key exists only here:

skip_batches=0  leave out the batches of this many steps up to and including `step`, and use the
                next ones instead: the cause of a spike precedes the step whose loss is too high

If no change is given, the three usual suspects are tried: the data (skip_batches=8), the optimizer
(update clipping, or beta2=0.9 if the run clips already) and the numerics (float32). A change acts
from step `change_from` on, by default from the first replayed step: the earlier it acts, the more
the trajectory diverges for other reasons. Each of several steps `change_from` has its own replays.
Additional replays (`perturbed`) change nothing but the last digit of the weights at that step. If
the spike is gone in these replays too, a change that removes it proves little.

Prints a table, and writes the table and every step to RUN/replays/. The run itself is not changed.
"""

import hashlib
import itertools
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.naming import join
from experiments.entry import parse_command, refuse, run_command
from experiments.replay_report import CONTROL, PERTURBED, UNCHANGED, Replay, compare, report
from lowprec.config.check import ConfigError, RunError, removed_settings
from lowprec.config.compose import compose_command
from lowprec.config.schema import Config, PrecisionChangeConfig, key
from lowprec.diagnostics.spikes import Protocol, protocol_of
from lowprec.runs.attempts import CheckpointError
from lowprec.runs.read import read_config, read_yaml, scan_rows
from lowprec.train.preflight import preflight
from lowprec.waiting import Waiting

MAX_NAME = 120  # characters of a file's name
IDLE = ("name", "scale", "remark", "run_dir", "log_every", "eval_every", "keep_checkpoints")
IDLE += ("resume", "evaluation", "logger", "diagnostics", "model.init_from", "data.val")
OR = "or"  # between changes that are tried one after the other


@dataclass
class ReplayConfig:
    """Which steps to replay, of which run."""

    run: str = key("???", "run directory")
    step: int = key("???", "the step to investigate", least=2)
    steps: int = key(
        20, "steps to replay after it, and before it (or fewer if no state is that old)", least=1
    )
    tolerance: float = key(
        0.01, "largest |difference| allowed between the control's and the recorded losses", least=0
    )
    change_from: list[int] = key(
        [], "first steps with the changes, such as 1138,1154; []: the first replayed step", least=1
    )
    perturbed: int = key(
        3, "number of unchanged replays from weights perturbed in the last digit", least=0
    )


@dataclass
class ReplayedConfig(Config):
    """A run's config, plus the key that only a replay has."""

    skip_batches: int = key(
        0, "leave out the batches of this many steps, up to and including `step`", least=0
    )


def main(config: ReplayConfig, changes: list[str]) -> None:
    """Replays the control and each variant; prints and writes a comparison."""
    run = Path(config.run)
    read = read_config(run)
    trained = asdict(read)
    if removed := removed_settings(read_yaml(run / "config.yaml")):
        raise RunError(f"{run} cannot be replayed: it set {', '.join(removed)}, since removed")
    if not any(run.glob("*/step_*")):
        raise RunError(f"{run} has no checkpoint or snapshot, so it cannot be replayed")
    trained["run_dir"], trained["model"]["init_from"] = str(run), None
    trained["evaluation"]["name"] = trained["logger"]["name"] = "none"
    recorded = pd.Series({row["step"]: row["loss"] for row in scan_rows(run / "metrics.jsonl")[0]})
    if config.step not in recorded:
        raise RunError(f"{run} has recorded steps 1 to {recorded.index.max()}")
    cache = trained["data"]["cache"]
    if cache and not (os.path.isdir(cache) and os.access(cache, os.R_OK | os.W_OK | os.X_OK)):
        trained["data"]["cache"] = None
        print(f"data.cache={cache} cannot be used here: images are decoded, to the same batches")
    variants_of(trained, changes)  # refuses wrong changes before torch is imported
    from lowprec.train.snapshots import state_before

    starts = sorted(set(config.change_from))
    before = max([config.steps, *(config.step + 1 - start for start in starts)])
    state, manifest = state_before(run, config.step, before)
    if layout := manifest["provenance"].get("layout"):  # the order of a stream depends on it
        trained["num_workers"] = layout["workers"]
    if manifest["step"] + 1 >= (read.precision_change.step or math.inf):  # the change is past
        trained["precision"] = asdict(read.precision_at(manifest["step"] + 1))
        trained["precision_change"] = asdict(PrecisionChangeConfig())
    variants = variants_of(trained, changes)
    first, last = manifest["step"] + 1, min(config.step + config.steps, trained["num_steps"])
    for start in starts:
        if not first <= start <= config.step:
            raise RunError(f"change_from={start}: a step from {first} to {config.step} is expected")
    if short := [name for name, variant in variants.items() if variant.num_steps < last]:
        raise RunError(f"{short[0]}: num_steps >= {last} is expected, the last step replayed")
    print(f"from {state}: steps {first} to {last} are replayed", flush=True)
    faults: list[str] = []
    frames = replays(config, variants, recorded, state, range(first, last + 1), faults)
    since = [f"change_from={','.join(map(str, starts))}"] if starts else []
    stem = "_".join([f"step_{config.step}", *since, *changes]).replace("/", "-")
    if len(stem) > MAX_NAME:
        stem = f"{stem[: MAX_NAME - 9]}_{hashlib.sha256(stem.encode()).hexdigest()[:8]}"
    protocol = protocol_of(warmup_steps=read.warmup_steps, **trained["diagnostics"]["spikes"])
    print(report(run / "replays" / stem, config.step, recorded, frames, protocol))
    if faults:
        raise RunError("; ".join(faults))


def replays(
    config: ReplayConfig,
    variants: dict[str, ReplayedConfig],
    recorded: pd.Series,
    state: Path,
    steps: range,
    faults: list[str],
) -> dict[Replay, pd.DataFrame]:
    """Takes `steps` from a state; returns the steps of each replay, the control first.

    Variants with the run's kind of loss scaler continue it; after the steps with another kind, a
    new one starts. Appends a fault for each variant that cannot load the state.
    """
    from experiments.replay_steps import Replayer  # loads torch

    starts = sorted(set(config.change_from)) or [steps[0]]
    later = [start for start in starts if start > steps[0]]
    keep_from = starts[0] if config.change_from else None
    unchanged, frames = variants.pop(CONTROL), {}
    count = 1 + len(later) + len(starts) * (config.perturbed + len(variants))
    numbers, num = itertools.count(1), len(starts)
    kinds = [f"{num * config.perturbed} {PERTURBED}"] * bool(config.perturbed)
    kinds = join([*kinds, *(f"{num} with {name}" for name in variants)])
    where = f"{kinds}, from step {join(map(str, starts))} on"
    print(f"{count} replays: {1 + len(later)} {UNCHANGED}; {where}", flush=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Waiting("loading")) as waiting,
        closing(Replayer(config.step, steps[-1], keep_from)) as replayer,
    ):

        def take(name: str, variant: ReplayedConfig, state: Path, **options: Any) -> pd.DataFrame:
            what = f"replay {next(numbers)} of {count}, {name}"
            replayer.on_step = lambda step: setattr(
                waiting, "doing", f"{what}: step {step} of {steps[-1]}"
            )
            return replayer.replay(variant, state, **options)

        save_after = [start - 1 for start in later]
        control = take(CONTROL, unchanged, state, save_after=save_after, folder=Path(folder))
        print(f"control: {compare(control, recorded, config.tolerance)}", flush=True)
        frames[Replay(CONTROL, steps[0])] = control
        states = dict.fromkeys(starts, state)
        states |= {start: Path(folder) / f"step_{start - 1:09d}" for start in later}
        for start in later:
            again = frames[Replay(UNCHANGED, start)] = take(UNCHANGED, unchanged, states[start])
            compare(again, recorded, config.tolerance)
        for start in starts:
            for seed in range(1, config.perturbed + 1):
                frame = take(PERTURBED, unchanged, states[start], perturbation=seed)
                frames[Replay(PERTURBED, start, seed)] = frame
        for name, variant in variants.items():
            keeps = variant.scaler.name == unchanged.scaler.name
            try:
                for start in starts:
                    frame = take(name, variant, states[start], keeps_scaler=keeps)
                    frames[Replay(name, start)] = frame
            except CheckpointError as error:
                faults.append(f"{name}: {error}")
    return frames


def variants_of(trained: dict, changes: list[str]) -> dict[str, ReplayedConfig]:
    """Returns the unchanged config as CONTROL, and each variant's config by its overrides.

    Raises ConfigError with the errors in all variants.
    """
    studies = [text for text in changes if text.startswith("experiment=")]
    if studies:
        raise ConfigError([f"{studies[0]}: a replay changes single keys and groups of the run"])
    keys = [text.partition("=")[0].lstrip("+") for text in changes]
    idle = [key for key in keys if any(f"{key}.".startswith(f"{name}.") for name in IDLE)]
    faults = [f"{key} changes nothing in a replay; leave it out" for key in idle]
    tried = [list(words) for is_or, words in groupby(changes, OR.__eq__) if not is_or]
    configs = {}
    for words in [[], *(tried or suspects(trained))]:
        try:
            options = {"multirun": True, "preflight": preflight, "base": trained}
            runs = compose_command(words, "replay", ReplayedConfig, **options)
            configs |= {" ".join(run.overrides) or CONTROL: run.config for run in runs}
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return configs


def suspects(trained: dict) -> Iterator[list[str]]:
    """Yields changes to the data, the optimizer and, unless the run uses float32, the numerics."""
    yield [f"skip_batches={Protocol.max_lead}"]
    if trained["optimizer"]["name"] == "stable_adamw":
        yield ["optimizer.beta2_decay=null", "optimizer.beta2=0.9"]
    else:
        yield ["optimizer=stable_adamw"]
    change = [name for name, value in trained["precision_change"].items() if value is not None]
    if trained["precision"]["autocast"] != "fp32" or trained["precision"]["recipe"] != "high":
        without = (f"precision_change.{name}=null" for name in change)
        yield ["precision=fp32", "scaler=none", *without]


def command() -> None:
    """Parses the command line: all keys that are not in ReplayConfig are changes to the run."""
    arguments = parse_command()
    own_keys, starts = {f.name for f in fields(ReplayConfig)}, "change_from="
    if foreign := [text for text in arguments.overrides if text.lstrip("+~").startswith("hydra")]:
        refuse(ConfigError([f"{text}: a replay runs in this process" for text in foreign]))
    changes = [text for text in arguments.overrides if text.partition("=")[0] not in own_keys]
    arguments.overrides = [
        f"{starts}[{text.removeprefix(starts).strip('[]')}]" if text.startswith(starts) else text
        for text in arguments.overrides
        if text not in changes
    ]
    arguments.multirun = False  # -m is not needed
    run_command(partial(main, changes=changes), "replay", ReplayConfig, arguments=arguments)


if __name__ == "__main__":
    command()
