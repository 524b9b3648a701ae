"""Replays the steps around a spike of a run, unchanged and with changes.

    python -m experiments.replay run=RUN step=1170
    python -m experiments.replay run=RUN step=1170 optimizer.beta2=0.95
    python -m experiments.replay -m run=RUN step=1170 optimizer.beta2=0.9,0.95
    python -m experiments.replay run=RUN step=1170 precision=fp32 scaler=none skip_batches=4

The replay starts from the newest snapshot or checkpoint at least `steps` steps before `step`.
First the steps are replayed unchanged: this control must reproduce the recorded losses, otherwise
the exit status is 1. Then they are replayed with the changes, which are any keys and groups of a
run: all of a command line together, or with -m each combination. `skip_batches=N` leaves out the
batches of N steps, the last of them `step`, and uses the next ones instead: a loss counts as a
spike when it exceeds the bound, so its cause came earlier. Without a change the three usual
suspects are tried: the data (skip_batches=8), the optimizer (update clipping; where it clips
already, beta2=0.9) and the numerics (float32). A change acts from the first replayed step on: the
earlier that step, the more the trajectory diverges for other reasons.

Prints a table and writes it, every step and a figure to RUN/replays/. The run is not changed.
"""

import io
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path

import pandas as pd
from hydra._internal.utils import get_args_parser
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from analysis import style
from analysis.spike_marks import TENSOR
from experiments.entry import run_command
from lowprec.config.check import ConfigError, RunError, check
from lowprec.config.combinations import combination_faults
from lowprec.config.compose import change, expand
from lowprec.config.preflight import preflight
from lowprec.config.schema import EIGHT_BIT, Config, key
from lowprec.data.open import open_data
from lowprec.diagnostics.spikes import Protocol, protocol_of
from lowprec.runs import durable
from lowprec.runs.attempts import CheckpointError
from lowprec.runs.identity import to_dict
from lowprec.runs.read import read_config, scan_rows

QUESTIONS = {  # what a change of a key asks about
    "data": ("skip_batches", "data", "seed", "batch_size"),
    "optimizer": ("optimizer", "schedule", "num_steps"),
    "numerics": ("precision", "scaler", "compile", "checkpointing", "device", "deterministic"),
}
STAYS = 0.5  # share of the control's height above which the spike remains
BEFORE = 20  # recorded steps before the spike that show how much losses scatter
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclass
class ReplayConfig:
    """Which steps to replay, of which run."""

    run: str = key("???", "a run directory")
    step: int = key("???", "the step to investigate", least=2)
    steps: int = key(20, "steps to replay after it, and before it if a state is so old", least=1)
    tolerance: float = key(
        0.01, "largest |difference| of the control's losses from the recorded ones", least=0
    )


@dataclass
class ReplayedConfig(Config):
    """A run's config, and the key that only a replay has."""

    skip_batches: int = key(0, "leave out the batches of so many steps up to `step`", least=0)


def main(config: ReplayConfig, changes: list[str], multirun: bool = False) -> None:
    """Replays the control and each variant, then prints and writes a comparison."""
    from lowprec.train.snapshots import state_before

    run = Path(config.run)
    trained = to_dict(read_config(run))
    trained["run_dir"], trained["model"]["init_from"] = str(run), None
    trained["evaluation"]["name"] = trained["logger"]["name"] = "none"
    losses = {row["step"]: row["loss"] for row in scan_rows(run / "metrics.jsonl")[0]}
    if config.step not in losses:
        raise RunError(f"{run} has recorded steps 1 to {max(losses, default=0)}")
    faults, replayed = [], {}
    try:
        state, manifest = state_before(run, config.step, config.steps)
        if layout := manifest["provenance"].get("layout"):  # the order of a stream depends on it
            trained["num_workers"] = layout["workers"]
        variants = variants_of(trained, changes, multirun)
    except CheckpointError as error:
        raise RunError(str(error)) from error
    first, last = manifest["step"] + 1, min(config.step + config.steps, trained["num_steps"])
    print(f"from {state}: steps {first} to {last}", flush=True)
    for name, variant in variants.items():
        try:
            keeps_scaler = variant.scaler.name == trained["scaler"]["name"]
            replayed[name] = replay(variant, state, config.step, last, keeps_scaler=keeps_scaler)
        except CheckpointError as error:
            if name == "control":
                raise RunError(str(error)) from error
            faults.append(f"{name}: {error}")
        if name == "control":
            difference = compare(replayed[name], losses, config.tolerance)
            print(f"control: {difference}", flush=True)
    stem = "_".join([f"step_{config.step}", *changes]).replace("/", "-")[:120]
    protocol = protocol_of(**trained["diagnostics"]["spikes"])
    print(report(run, config.step, losses, replayed, run / "replays" / stem, protocol))
    if faults:
        raise RunError("; ".join(faults))


def variants_of(trained: dict, changes: list[str], multirun: bool) -> dict[str, ReplayedConfig]:
    """Returns "control", the unchanged config, and that of each variant by its overrides.

    Raises ConfigError with the faults of all variants.
    """
    faults: list[str] = []
    variants = expand(changes, ReplayedConfig, faults) if changes else list(suspects(trained))
    if changes and not multirun and len(variants) > 1:
        faults.append("this is a sweep: python -m experiments.replay -m ...")
    configs = {}
    for variant in [(), *variants]:
        try:
            config = check(changed(trained, variant), ReplayedConfig)
            if combination := list(combination_faults(config)):
                raise ConfigError(combination)
            preflight(config)
            configs[" ".join(variant) or "control"] = config
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return configs


def suspects(trained: dict) -> Iterator[tuple[str, ...]]:
    """Yields a change of the data, of the optimizer and, unless it is float32, of the numerics."""
    yield (f"skip_batches={Protocol.max_lead}",)
    if trained["optimizer"]["name"] == "stable_adamw":
        yield ("optimizer.beta2_decay=null", "optimizer.beta2=0.9")
    else:
        yield ("optimizer=stable_adamw",)
    if trained["precision"]["autocast"] != "fp32" or trained["precision"]["recipe"] != "high":
        yield ("precision=fp32", "scaler=none")


def changed(trained: dict, overrides: tuple[str, ...]) -> dict:
    """Applies overrides to a run's plain config; ConfigError for those a replay cannot apply."""
    for text in overrides:
        if text.partition("=")[0] == "experiment":
            raise ConfigError([f"{text}: a replay changes single keys and groups of the run"])
        if text in (f"optimizer={name}" for name in EIGHT_BIT):
            kept = trained["optimizer"]["name"]
            raise ConfigError([f"{text}: the state of a run with {kept} has no such 8-bit moments"])
    return change(trained, overrides)


def replay(
    config: ReplayedConfig, state: Path, step: int, last: int, *, keeps_scaler: bool = True
) -> list[dict]:
    """Trains from a state to step `last`, or to the first loss that is not finite.

    Args:
        config: of the run, or changed.
        state: a snapshot or checkpoint.
        step: the last step whose batch `skip_batches` leaves out.
        last: the last step.
        keeps_scaler: whether the state's loss scaler continues; otherwise a new one starts.

    Returns:
        Rows `step, loss, rms`; `rms` is RMS_t of the patch embedding, NaN without one.
    """
    from lowprec.optim.loss_scaling import NoScaler
    from lowprec.optim.stable_adamw import STATISTICS
    from lowprec.train.build import build
    from lowprec.train.loop import Stepper
    from lowprec.train.snapshots import step_of

    built = build(config, open_data(config))
    scaler, optimizer = built.state.scaler, built.state.optimizer
    built.state.scaler = scaler if keeps_scaler else NoScaler()
    built.state.load(state)
    built.state.scaler = scaler
    take_step, rows = Stepper(built), []
    first, names = step_of(state) + 1, optimizer.names
    batches = built.batches_from(first)
    skip_at = max(first, step + 1 - config.skip_batches)
    for number in range(first, last + 1):
        if number == skip_at:
            batches = islice(batches, config.skip_batches, None)
        batch = next(batches, None)
        if batch is None:  # the run's last batch came before, since some were left out
            break
        loss = take_step(number, batch)["loss"].item()
        rms = optimizer.statistics[:, STATISTICS.index("rms")].tolist()
        rms = rms[names.index(TENSOR)] if TENSOR in names else math.nan
        rows.append({"step": number, "loss": loss, "rms": rms})
        if take_step.frozen.item():
            break
    return rows


def compare(control: list[dict], recorded: dict[int, float], tolerance: float) -> str:
    """Says how well the control reproduces the record; raises RunError if it does not."""
    pairs = [(r["step"], r["loss"], recorded[r["step"]]) for r in control if r["step"] in recorded]
    differences = {
        step: 0.0 if repr(loss) == repr(known) else abs(loss - known) for step, loss, known in pairs
    }
    if not any(differences.values()):
        return f"reproduces the {len(pairs)} recorded losses to the bit"
    worst = max(
        differences, key=lambda step: (not differences[step] <= tolerance, differences[step])
    )
    text = (
        f"the largest difference from {len(pairs)} recorded losses is {differences[worst]:.3g}, "
        f"at step {worst} (bound: tolerance={tolerance:g})"
    )
    if differences[worst] <= tolerance:
        return text
    raise RunError(
        f"the control does not reproduce the run: {text}. To the bit it takes the same code, "
        "versions, machine and threads, and on a GPU deterministic=true"
    )


def report(
    run: Path,
    step: int,
    recorded: dict[int, float],
    replayed: dict[str, list[dict]],
    stem: Path,
    protocol: Protocol,
) -> str:
    """Writes `<stem>.csv`, `<stem>_table.csv` and `<stem>.png`; returns the text to print."""
    frames = {name: pd.DataFrame(rows) for name, rows in replayed.items()}
    record = pd.DataFrame({"step": list(recorded), "loss": list(recorded.values())})
    steps = frames["control"]["step"]
    record = record[record["step"].between(steps.min(), steps.max())]
    curves = [record.assign(change="recorded")]
    curves += [frame.assign(change=name) for name, frame in frames.items()]
    curves = pd.concat(curves)[["change", "step", "loss", "rms"]]
    compared = table(frames, step, protocol)
    stem.parent.mkdir(exist_ok=True)
    for ending, frame in ((".csv", curves), ("_table.csv", compared)):
        text = frame.to_csv(index=False, lineterminator="\n")
        durable.replace(stem.with_name(stem.name + ending), text.encode())
    with style.style():
        figure, picture = Figure(layout="constrained"), io.BytesIO()
        draw(figure, frames, record, step, run.resolve().name)
        figure.savefig(picture, format="png")
    durable.replace(stem.with_name(stem.name + ".png"), picture.getvalue())
    text = compared.to_string(index=False, float_format=lambda value: f"{value:.4g}", na_rep="-")
    return f"{text}\n{verdict(recorded, compared, step, protocol)}\nWrote {stem}.png"


def table(frames: dict[str, pd.DataFrame], step: int, protocol: Protocol) -> pd.DataFrame:
    """Compares replays in a table, one row each.

    Columns: `change`; `question`, what it asks about; `loss` at the step; `peak`, the largest loss
    around the step, as a change may shift a spike; `height`, the peak minus the median loss of all
    steps before; `of_control`, its share of the control's height; `rms`, the largest RMS_t. A
    non-finite loss is infinitely high.
    """
    rows, whole = [], height(frames["control"], step, protocol)
    for name, frame in frames.items():
        at, own = frame[frame["step"] == step]["loss"], height(frame, step, protocol)
        share = 1.0 if own == whole else 0.0 if math.isinf(whole) else own / whole
        rows.append(
            {
                "change": name,
                "question": question(name),
                "loss": at.iloc[0] if len(at) else math.nan,
                "peak": peak(frame, step, protocol),
                "height": own,
                "of_control": share,
                "rms": frame["rms"].max(),
            }
        )
    return pd.DataFrame(rows)


def peak(frame: pd.DataFrame, step: int, protocol: Protocol) -> float:
    """Returns the largest loss at most `protocol.within` steps away; inf if it is not finite.

    Also inf if the replay ended earlier, since its loss was not finite.
    """
    around = frame[(frame["step"] - step).abs() <= protocol.within]["loss"]
    return max((loss if math.isfinite(loss) else math.inf for loss in around), default=math.inf)


def height(frame: pd.DataFrame, step: int, protocol: Protocol) -> float:
    """Returns `peak` minus the median loss of the steps before."""
    highest = peak(frame, step, protocol)
    if math.isinf(highest):
        return highest
    return highest - statistics.median(frame[frame["step"] < step]["loss"])


def question(change: str) -> str:
    """Names what a change's keys concern: data, optimizer, numerics, "model or other", or "-"."""
    keys = {text.partition("=")[0].partition(".")[0] for text in change.split()} - {"control"}
    about = [name for name, known in QUESTIONS.items() if keys & set(known)]
    others = keys - {name for known in QUESTIONS.values() for name in known}
    return "+".join([*about, *(["model or other"] if others else [])]) or "-"


def verdict(
    recorded: dict[int, float], compared: pd.DataFrame, step: int, protocol: Protocol
) -> str:
    """Says with which changes the spike is gone and with which it remains."""
    before = [recorded[number] for number in range(step - BEFORE, step) if number in recorded]
    noise = protocol.loss_sigmas * statistics.pstdev(before)
    rise = compared["height"].iloc[0]
    if not rise > noise:
        return (
            f"No spike around step {step}: the loss rises by {rise:.3g}, within "
            f"{protocol.loss_sigmas:g} standard deviations ({noise:.3g}) of the {len(before)} "
            "steps before."
        )
    variants, lines = compared[compared["change"] != "control"], []
    is_gone = variants["of_control"] < STAYS
    for outcome, rows in (("is gone", variants[is_gone]), ("stays", variants[~is_gone])):
        names = [f"{row.question} ({row.change})" for row in rows.itertuples()]
        lines.append(f"The spike {outcome} with: {', '.join(names) or 'no change'}.")
    return "\n".join([*lines, f"Gone means lower than {STAYS:.0%} of the control's height."])


def draw(
    figure: Figure, frames: dict[str, pd.DataFrame], record: pd.DataFrame, step: int, title: str
) -> None:
    """Plots the loss above RMS_t of the patch embedding, one line per replay; dots: recorded."""
    figure.set_size_inches(style.COLUMN_WIDTH, 3.6 + 0.12 * len(frames))
    loss, rms = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    loss.plot(record["step"], record["loss"], "o", color=style.OTHER, ms=3, label="recorded")
    for number, (name, frame) in enumerate(frames.items()):
        color = COLORS[(number - 1) % len(COLORS)] if number else "#000000"
        for axes, column in ((loss, "loss"), (rms, "rms")):
            finite = frame[column].where(frame[column].abs() < math.inf)
            width = 0.9 if number else 1.8  # a replay equal to the control lies on it
            axes.plot(frame["step"], finite, color=color, lw=width, label=name)
    rms.axhline(Protocol.rms_threshold, color=style.OTHER, lw=0.7, ls=(0, (4, 2)))
    for axes in (loss, rms):
        axes.axvline(step, color=style.OTHER, lw=0.5)
    loss.set_title(title)
    loss.set(ylabel="training loss")
    rms.set(ylabel=r"$\mathrm{RMS}_t$", xlabel="step", yscale="log")
    rms.set_title(TENSOR, loc="right", fontsize=6)
    rms.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    rms.yaxis.set_major_formatter("{x:g}")
    rms.yaxis.set_minor_formatter(NullFormatter())
    figure.legend(*loss.get_legend_handles_labels(), loc="outside lower left")


def command() -> None:
    """Parses the command line: keys of ReplayConfig are its own, all others are changes."""
    arguments = get_args_parser().parse_args()
    own = {f.name for f in fields(ReplayConfig)}
    overrides = [text for text in arguments.overrides if not text.startswith("hydra")]
    changes = [text for text in overrides if text.partition("=")[0] not in own]
    dropped = {*changes, "-m", "--multirun"}
    sys.argv[1:] = [text for text in sys.argv[1:] if text not in dropped]
    run_command(partial(main, changes=changes, multirun=arguments.multirun), "replay", ReplayConfig)


if __name__ == "__main__":
    command()
