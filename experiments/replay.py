"""Replays the steps around a spike of a run, as they were and with something changed.

    python -m experiments.replay run=RUN step=1170
    python -m experiments.replay run=RUN step=1170 optimizer.beta2=0.95
    python -m experiments.replay -m run=RUN step=1170 optimizer.beta2=0.9,0.95
    python -m experiments.replay run=RUN step=1170 precision=fp32 scaler=none skip_batches=4

From the newest snapshot or checkpoint at least `steps` steps before, the steps are first replayed
as they were: this control must reproduce the recorded losses, else the exit is 1. Then with the
changes: any keys and groups of a run, all of one command line together; under -m each cell.
`skip_batches=N` leaves out the batches of N steps, the last of them `step`, and takes the next in
their place: a spike is counted where it is past the bound, so what caused it came before. Without
a change the three usual suspects are tried: the data (skip_batches=8), the optimizer (update
clipping, or where it clips already beta2=0.9) and the numerics (float32). A change acts from the
first step replayed on: the further that is before the spike, the more a change leads elsewhere.

Prints a table and writes it, every step and a figure into RUN/replays/; nothing else of the run is
changed.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from hydra._internal.utils import get_args_parser

from experiments.entry import run_command
from experiments.evaluate import read_config
from lowprec.config.check import ConfigError, RunError, check
from lowprec.config.combinations import combination_faults
from lowprec.config.compose import change, expand
from lowprec.config.preflight import preflight
from lowprec.config.schema import EIGHT_BIT, Config, key
from lowprec.data.open import open_data
from lowprec.diagnostics.spikes import Protocol, protocol_of
from lowprec.runs.identity import to_dict
from lowprec.runs.read import scan_rows

if TYPE_CHECKING:
    from lowprec.train.build import Built


@dataclass
class ReplayConfig:
    """Which steps of which run."""

    run: str = key("???", "a run directory")
    step: int = key("???", "the step looked into", least=2)
    steps: int = key(20, "replayed after it, and before it where a state is so old", least=1)
    tolerance: float = key(
        0.01, "largest |difference| of a control's loss from the recorded one", least=0
    )


@dataclass
class ReplayedConfig(Config):
    """A run's config, and what only a replay can change."""

    skip_batches: int = key(0, "leave out the batches of so many steps up to `step`", least=0)


@dataclass
class Variant:
    """What is changed, as on a command line, and the config that results."""

    name: str
    config: ReplayedConfig


def main(config: ReplayConfig, changes: list[str], multirun: bool = False) -> None:
    """Replays control and variants, prints and writes what they show."""
    from experiments.replay_report import report
    from lowprec.runs.attempts import CheckpointError
    from lowprec.train.snapshots import state_before

    run = Path(config.run)
    trained = to_dict(read_config(run))
    trained["run_dir"], trained["model"]["init_from"] = str(run), None
    trained["evaluation"]["name"] = trained["logger"]["name"] = "none"
    rows = {row["step"]: row["loss"] for row in scan_rows(run / "metrics.jsonl")[0]}
    if config.step not in rows:
        raise RunError(f"{run} has recorded steps 1 to {max(rows, default=0)}")
    try:
        path, manifest = state_before(run, config.step, config.steps)
        layout = manifest["provenance"].get("layout")
        if layout:  # of a stream: the order of samples follows from it
            trained["num_workers"] = layout["workers"]
        control, *variants = variants_of(trained, changes, multirun)
        first, last = manifest["step"] + 1, min(config.step + config.steps, trained["num_steps"])
        print(f"from {path}: steps {first} to {last}", flush=True)
        replayed = {"control": replay(path, control, control.config, config.step, last)}
        verdict = compare(replayed["control"], rows, config.tolerance)
        print(f"control: {verdict}", flush=True)
    except CheckpointError as error:
        raise RunError(str(error)) from error
    faults = []
    for variant in variants:
        try:
            replayed[variant.name] = replay(path, variant, control.config, config.step, last)
        except CheckpointError as error:
            faults.append(f"{variant.name}: {error}")
    stem = "_".join([f"step_{config.step}", *changes]).replace("/", "-")[:120]
    protocol = protocol_of(**trained["diagnostics"]["spikes"])
    print(report(run, config.step, rows, replayed, run / "replays" / stem, protocol))
    if faults:
        raise RunError("; ".join(faults))


def variants_of(trained: dict, changes: list[str], multirun: bool) -> list[Variant]:
    """The run as it was, then each cell of the changes; ConfigError with the faults of all."""
    faults: list[str] = []
    cells = expand(changes, ReplayedConfig, faults) if changes else list(suspects(trained))
    if changes and not multirun and len(cells) > 1:
        faults.append("this is a sweep: python -m experiments.replay -m ...")
    found = []
    for cell in [(), *cells]:
        try:
            config = check(changed(trained, cell), ReplayedConfig)
            if problems := list(combination_faults(config)):
                raise ConfigError(problems)
            preflight(config)
            found.append(Variant(" ".join(cell) or "control", config))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return found


def suspects(trained: dict) -> Iterator[tuple[str, ...]]:
    """A change of the data, of the optimizer and of the numerics, where the run differs from it."""
    yield (f"skip_batches={Protocol.max_lead}",)
    clips = trained["optimizer"]["name"] == "stable_adamw"
    yield (
        ("optimizer.beta2_decay=null", "optimizer.beta2=0.9")
        if clips
        else ("optimizer=stable_adamw",)
    )
    if trained["precision"]["autocast"] != "fp32" or trained["precision"]["recipe"] != "high":
        yield ("precision=fp32", "scaler=none")


def changed(trained: dict, cell: tuple[str, ...]) -> dict:
    """A run's plain config with single overrides applied; ConfigError for one a replay refuses."""
    for text in cell:
        if text.partition("=")[0] == "experiment":
            raise ConfigError([f"{text}: a replay changes single keys and groups of the run"])
        if text in (f"optimizer={other}" for other in EIGHT_BIT):
            kept = trained["optimizer"]["name"]
            raise ConfigError([f"{text}: the state of a run with {kept} has no such 8-bit moments"])
    return change(trained, cell)


def replay(path: Path, variant: Variant, trained: Config, step: int, last: int) -> list[dict]:
    """Rows `step, loss, rms` from a state on, to a step or the first that is not finite.

    `rms`: RMS_t of the patch embedding, NaN for a model that has none of that name.
    """
    from analysis.spike_marks import TENSOR
    from lowprec.optim.schedules import set_learning_rate
    from lowprec.optim.stable_adamw import STATISTICS
    from lowprec.train.build import build
    from lowprec.train.loop import rate_of
    from lowprec.train.snapshots import step_of
    from lowprec.train.step import GraphedStep, TrainStep, can_capture

    config = variant.config
    built = build(config, open_data(config))
    _load(built, path, keeps_scaler=config.scaler.name == trained.scaler.name)
    update = plain = TrainStep(built.task, built.state.optimizer, built.state.scaler)
    first, names = step_of(path) + 1, built.state.optimizer.names
    batches = built.batches_from(first)
    built.task.model.train()
    rows = []
    for number in range(first, last + 1):
        if number == max(first, step + 1 - config.skip_batches):
            for _ in range(config.skip_batches):
                next(batches, None)
        batch = next(batches, None)
        if batch is None:  # the run's last, after one was left out
            break
        if number == first and can_capture(config, built.device):
            update = GraphedStep(plain, batch)
        set_learning_rate(built.state.optimizer, rate_of(number, config))
        loss = update(batch)["loss"].item()
        rms = built.state.optimizer.statistics[:, STATISTICS.index("rms")].tolist()
        shown = rms[names.index(TENSOR)] if TENSOR in names else float("nan")
        rows.append({"step": number, "loss": loss, "rms": shown})
        if plain.frozen.item():
            break
    return rows


def _load(built: "Built", path: Path, *, keeps_scaler: bool) -> None:
    """Loads a state; a scaler that the run did not have begins anew."""
    from lowprec.optim.loss_scaling import NoScaler

    scaler = built.state.scaler
    built.state.scaler = scaler if keeps_scaler else NoScaler()
    built.state.load(path)
    built.state.scaler = scaler


def compare(control: list[dict], recorded: dict[int, float], tolerance: float) -> str:
    """How well the control reproduces the record, in words; RunError if it does not."""
    pairs = [(r["step"], r["loss"], recorded[r["step"]]) for r in control if r["step"] in recorded]
    if all(repr(loss) == repr(known) for _, loss, known in pairs):
        return f"the {len(pairs)} recorded losses to the bit"
    apart = {
        step: 0.0 if repr(loss) == repr(known) else abs(loss - known) for step, loss, known in pairs
    }
    worst = max(apart, key=lambda step: (not apart[step] <= tolerance, apart[step]))
    said = f"largest difference from the {len(pairs)} recorded losses {apart[worst]:.3g}, at step "
    said += f"{worst} (bound: tolerance={tolerance:g})"
    if apart[worst] <= tolerance:
        return said
    raise RunError(
        f"the control does not reproduce the run: {said}. Bits are the same with the same code, "
        "versions, machine and threads, on a GPU also deterministic=true"
    )


def command() -> None:
    """The command line: keys of ReplayConfig are its own, all others are changes."""
    arguments = get_args_parser().parse_args()
    own = {f.name for f in fields(ReplayConfig)}
    texts = [text for text in arguments.overrides if not text.startswith("hydra")]
    changes = [text for text in texts if text.partition("=")[0] not in own]
    left_out = {*changes, "-m", "--multirun"}
    sys.argv[1:] = [text for text in sys.argv[1:] if text not in left_out]
    task = partial(main, changes=changes, multirun=arguments.multirun)
    run_command(task, "replay", ReplayConfig)


if __name__ == "__main__":
    command()
