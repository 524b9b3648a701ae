"""Replays the steps around a spike of a run, unchanged and with changes.

    python -m experiments.replay run=RUN step=1170
    python -m experiments.replay run=RUN step=1170 optimizer.beta2=0.95
    python -m experiments.replay -m run=RUN step=1170 optimizer.beta2=0.9,0.95

The replay starts from the newest snapshot or checkpoint at least `steps` steps before `step`.
First, the steps are replayed unchanged: this control must reproduce the recorded losses, otherwise
the exit status is 1. Then they are replayed with the changes, which may be any keys and groups of a
run: all changes together, or with -m each combination. `skip_batches=N` leaves out the batches of
the last N steps up to and including `step` and uses the next batches instead: the cause of a spike
comes before the step at which its loss exceeds the bound. If no change is given, the three usual
suspects are tried: the data (skip_batches=8), the optimizer (update clipping, or beta2=0.9 if the
run clips already) and the numerics (float32). A change acts from step `change_from` on, by default
from the first replayed step: the earlier it acts, the more the trajectory diverges for other
reasons. Additional replays (`perturbed`) change nothing but the last digit of the weights at that
step. If the spike is gone in these replays too, a change that removes it proves little.

Prints a table, and writes the table, every step and a figure to RUN/replays/. The run itself is not
changed.
"""

import io
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from analysis import style
from analysis.spike_marks import TENSOR
from experiments.entry import parse_command, run_command
from lowprec.config.check import ConfigError, RunError, check
from lowprec.config.combinations import combination_faults
from lowprec.config.compose import change, expand_sweep
from lowprec.config.preflight import preflight
from lowprec.config.schema import Config, PrecisionChangeConfig, key
from lowprec.data.open import open_data
from lowprec.diagnostics.spikes import Protocol, protocol_of
from lowprec.runs import durable
from lowprec.runs.attempts import CheckpointError, step_of
from lowprec.runs.identity import to_dict
from lowprec.runs.read import read_config, scan_rows

PERTURBED = "perturbed"  # name of the replays from perturbed weights
STAYS = 0.5  # share of the control's height from which on the spike counts as still there
BEFORE = 20  # recorded steps before the spike that show how much losses scatter


@dataclass
class ReplayConfig:
    """Which steps to replay, of which run."""

    run: str = key("???", "run directory")
    step: int = key("???", "the step to investigate", least=2)
    steps: int = key(
        20, "steps to replay after it, and before it if the run kept a state that old", least=1
    )
    tolerance: float = key(
        0.01, "largest |difference| allowed between the control's and the recorded losses", least=0
    )
    change_from: int | None = key(
        None, "first step with the changes; null: the first replayed one", least=1
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


def main(config: ReplayConfig, changes: list[str], multirun: bool = False) -> None:
    """Replays the control and each variant; prints and writes a comparison."""
    run = Path(config.run)
    trained = to_dict(read_config(run))
    trained["run_dir"], trained["model"]["init_from"] = str(run), None
    trained["evaluation"]["name"] = trained["logger"]["name"] = "none"
    recorded = pd.Series({row["step"]: row["loss"] for row in scan_rows(run / "metrics.jsonl")[0]})
    if config.step not in recorded:
        raise RunError(f"{run} has recorded steps 1 to {recorded.index.max()}")
    variants_of(trained, changes, multirun)  # refuses wrong changes before torch is imported
    from lowprec.train.snapshots import state_before

    faults: list[str] = []
    state, manifest = state_before(run, config.step, config.steps)
    if layout := manifest["provenance"].get("layout"):  # the order of a stream depends on it
        trained["num_workers"] = layout["workers"]
    read = read_config(run)
    if manifest["step"] + 1 >= (read.precision_change.step or math.inf):  # the change is past
        trained["precision"] = to_dict(read.precision_at(manifest["step"] + 1))
        trained["precision_change"] = to_dict(PrecisionChangeConfig())
    variants = variants_of(trained, changes, multirun)
    first, last = manifest["step"] + 1, min(config.step + config.steps, trained["num_steps"])
    print(f"from {state}: steps {first} to {last}", flush=True)
    unchanged = variants.pop("control")
    control = replay(unchanged, state, config.step, last)
    print(f"control: {compare(control, recorded, config.tolerance)}", flush=True)
    replayed = {"control": control}
    with tempfile.TemporaryDirectory() as folder:
        if config.change_from is not None and config.change_from > first:
            if config.change_from > config.step:
                raise RunError(f"change_from={config.change_from} is after step={config.step}")
            replay(unchanged, state, config.step, config.change_from - 1, save_to=Path(folder))
            state = Path(folder) / f"step_{config.change_from - 1:09d}"
        for seed in range(1, config.perturbed + 1):
            name = f"{PERTURBED} {seed}"
            replayed[name] = replay(unchanged, state, config.step, last, perturbation=seed)
        for name, variant in variants.items():
            keeps = variant.scaler.name == trained["scaler"]["name"]
            try:
                replayed[name] = replay(variant, state, config.step, last, keeps_scaler=keeps)
            except CheckpointError as error:
                faults.append(f"{name}: {error}")
    since = [] if config.change_from is None else [f"change_from={config.change_from}"]
    stem = "_".join([f"step_{config.step}", *since, *changes]).replace("/", "-")[:120]
    protocol = protocol_of(**trained["diagnostics"]["spikes"])
    print(report(run / "replays" / stem, config.step, recorded, replayed, protocol))
    if faults:
        raise RunError("; ".join(faults))


def variants_of(trained: dict, changes: list[str], multirun: bool) -> dict[str, ReplayedConfig]:
    """Returns the unchanged config as "control", and each variant's config by its overrides.

    Raises ConfigError with the errors in all variants.
    """
    faults: list[str] = []
    variants = expand_sweep(changes, ReplayedConfig, faults) if changes else list(suspects(trained))
    if changes and not multirun and len(variants) > 1:
        faults.append("this is a sweep: python -m experiments.replay -m ...")
    configs = {}
    for variant in [(), *variants]:
        try:
            for text in variant:
                if text.partition("=")[0] == "experiment":
                    fault = f"{text}: a replay changes single keys and groups of the run"
                    raise ConfigError([fault])
            config = check(change(trained, variant), ReplayedConfig)
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
    """Yields changes to the data, the optimizer and, unless the run uses float32, the numerics."""
    yield (f"skip_batches={Protocol.max_lead}",)
    if trained["optimizer"]["name"] == "stable_adamw":
        yield ("optimizer.beta2_decay=null", "optimizer.beta2=0.9")
    else:
        yield ("optimizer=stable_adamw",)
    change = [name for name, value in trained["precision_change"].items() if value is not None]
    if trained["precision"]["autocast"] != "fp32" or trained["precision"]["recipe"] != "high":
        without = (f"precision_change.{name}=null" for name in change)
        yield ("precision=fp32", "scaler=none", *without)


def replay(
    config: ReplayedConfig,
    state: Path,
    step: int,
    last: int,
    *,
    keeps_scaler: bool = True,
    perturbation: int | None = None,
    save_to: Path | None = None,
) -> pd.DataFrame:
    """Trains from a snapshot or checkpoint to step `last`, or until a loss is not finite.

    `skip_batches` leaves out the batches up to and including that of `step`. If `keeps_scaler`, the
    state's loss scaler continues; otherwise a new one starts. `perturbation` is the seed of a
    relative change of all weights at the precision of their dtype. If `save_to` is given, the state
    after `last` is saved there as a checkpoint. Returns the columns step, loss and rms: RMS_t of
    the patch embedding, or NaN if the model has none.
    """
    from lowprec.optim.loss_scaling import NoScaler
    from lowprec.optim.stable_adamw import STATISTICS
    from lowprec.train.build import build
    from lowprec.train.checkpoint import save_checkpoint
    from lowprec.train.loop import Stepper

    built = build(config, open_data(config))
    scaler, optimizer = built.state.scaler, built.state.optimizer
    built.state.scaler = scaler if keeps_scaler else NoScaler()
    built.state.load(state)
    built.state.scaler = scaler
    if perturbation is not None:
        perturb(built.task.model, perturbation)
    take_step, rows = Stepper(built), []
    first, names = step_of(state) + 1, optimizer.names
    batches = built.batches_from(first)
    skip_at = max(first, step + 1 - config.skip_batches)
    earlier, later = islice(batches, skip_at - first), islice(batches, config.skip_batches, None)
    for number, batch in zip(range(first, last + 1), chain(earlier, later), strict=False):
        loss = take_step(number, batch)["loss"].item()
        rms = optimizer.statistics[:, STATISTICS.index("rms")].tolist()
        rms = rms[names.index(TENSOR)] if TENSOR in names else math.nan
        rows.append({"step": number, "loss": loss, "rms": rms})
        if take_step.frozen.item():
            break
    if save_to is not None:
        save_checkpoint(save_to, last, built.state, {}, keep=1, provenance={})
    return pd.DataFrame(rows)


def perturb(model, seed: int) -> None:
    """Multiplies each weight by 1 + eps * n, with its dtype's eps and a standard normal n."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.device)
            p.copy_(p.float() * (1 + torch.finfo(p.dtype).eps * noise))


def compare(control: pd.DataFrame, recorded: pd.Series, tolerance: float) -> str:
    """Says how closely the control reproduces the record; raises RunError if it does not."""
    losses = control.set_index("step")["loss"]
    losses = losses[losses.index.isin(recorded.index)]
    expected = recorded[losses.index]
    equal = losses.map(repr) == expected.map(repr)
    if equal.all():
        return f"reproduces the {len(losses)} recorded losses exactly"
    differences = (losses - expected).abs().mask(equal, 0.0).fillna(math.inf)
    worst = differences.idxmax()
    text = (
        f"the largest difference from {len(losses)} recorded losses is {differences[worst]:.3g}, "
        f"at step {worst} (bound: tolerance={tolerance:g})"
    )
    if differences[worst] <= tolerance:
        return text
    raise RunError(
        f"the control does not reproduce the run: {text}. An exact match needs the same code, "
        "versions, machine and number of threads, and on a GPU deterministic=true"
    )


def report(
    stem: Path, step: int, recorded: pd.Series, frames: dict[str, pd.DataFrame], protocol: Protocol
) -> str:
    """Writes `<stem>.csv`, `<stem>_table.csv` and `<stem>.png`; returns the text to print."""
    record = recorded.rename_axis("step").rename("loss").reset_index()
    record = record[record["step"].isin(frames["control"]["step"])]
    curves = pd.concat({"recorded": record} | frames, names=["change"]).reset_index("change")
    compared = table(frames, step, protocol)
    stem.parent.mkdir(exist_ok=True)
    for ending, frame in ((".csv", curves), ("_table.csv", compared)):
        text = frame.to_csv(index=False, lineterminator="\n")
        durable.replace(stem.with_name(stem.name + ending), text.encode())
    with style.style():
        figure, picture = Figure(layout="constrained"), io.BytesIO()
        draw(figure, frames, record, step)
        figure.savefig(picture, format="png")
    durable.replace(stem.with_name(stem.name + ".png"), picture.getvalue())
    text = compared.to_string(index=False, float_format=lambda value: f"{value:.4g}", na_rep="-")
    return f"{text}\n{verdict(recorded, compared, step, protocol)}\nWrote {stem}.png"


def table(frames: dict[str, pd.DataFrame], step: int, protocol: Protocol) -> pd.DataFrame:
    """Compares the replays in a table with one row each.

    Columns: `change`; `loss` at the step; `peak`, the largest loss at most `protocol.within` steps
    from it, since a change may shift a spike; `height`, the peak minus the median loss of all
    replayed steps before `step` (of the control up to the change); `of_control`, the height
    relative to the control's; `rms`, the largest RMS_t. The height is infinite if the replay ended
    early or has a non-finite loss.
    """
    rows = []
    for name, frame in frames.items():
        losses = frame.set_index("step")["loss"]
        around = losses.loc[step - protocol.within : step + protocol.within]
        peak = around.where(around.abs() < math.inf, math.inf).max() if len(around) else math.inf
        before = frames["control"].set_index("step")["loss"].loc[: step - 1].copy()
        before.update(losses)
        height = peak if math.isinf(peak) else peak - before.median()
        numbers = {"loss": losses.get(step), "peak": peak, "height": height}
        rows.append({"change": name, **numbers, "rms": frame["rms"].max()})
    compared = pd.DataFrame(rows)
    control = compared["height"].iloc[0]
    with np.errstate(divide="ignore"):  # a control without any rise
        shares = [
            1.0 if height == control else 0.0 if math.isinf(control) else height / control
            for height in compared["height"]
        ]
    compared.insert(4, "of_control", shares)
    return compared


def verdict(recorded: pd.Series, compared: pd.DataFrame, step: int, protocol: Protocol) -> str:
    """Says which changes remove the spike and which leave it."""
    before = recorded[(step - BEFORE <= recorded.index) & (recorded.index < step)]
    noise = protocol.loss_sigmas * before.std(ddof=0)
    rise = compared["height"].iloc[0]
    if not rise > noise:
        return (
            f"No spike around step {step}: the loss rises by {rise:.3g}, which is within "
            f"{protocol.loss_sigmas:g} standard deviations ({noise:.3g}) of the {len(before)} "
            "losses before it."
        )
    is_perturbed = compared["change"].str.startswith(f"{PERTURBED} ")
    variants, lines = compared[(compared["change"] != "control") & ~is_perturbed], []
    if is_perturbed.any():
        stays = (compared.loc[is_perturbed, "of_control"] >= STAYS).sum()
        lines.append(
            f"With weights perturbed in their last digit, the spike stays in {stays} of "
            f"{is_perturbed.sum()} replays"
            + ("." if stays == is_perturbed.sum() else ", so it may also be gone by chance.")
        )
    is_gone = variants["of_control"] < STAYS
    for outcome, has_it in (("is gone", is_gone), ("stays", ~is_gone)):
        names = ", ".join(variants["change"][has_it])
        lines.append(f"The spike {outcome} with: {names or 'no change'}.")
    lines.append(f"A spike is gone if it is lower than {STAYS:.0%} of the control's height.")
    return "\n".join(lines)


def draw(figure: Figure, frames: dict[str, pd.DataFrame], record: pd.DataFrame, step: int) -> None:
    """Plots the loss above RMS_t of the patch embedding: a line per replay, dots for the record."""
    figure.set_size_inches(style.COLUMN_WIDTH, 3.6 + 0.12 * len(frames))
    loss, rms = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    loss.plot(record["step"], record["loss"], "o", color=style.OTHER, ms=3, label="recorded")
    for axes, column in ((loss, "loss"), (rms, "rms")):
        for name, frame in frames.items():
            is_control = name == "control"
            finite = frame[column].where(frame[column].abs() < math.inf)
            line = {"color": "black", "lw": 1.8} if is_control else {"lw": 0.9}
            axes.plot(frame["step"], finite, label=name, **line)
        axes.axvline(step, color=style.OTHER, lw=0.5)
    rms.axhline(Protocol.rms_threshold, color=style.OTHER, lw=0.7, ls=(0, (4, 2)))
    loss.set(ylabel="training loss")
    rms.set(ylabel=r"$\mathrm{RMS}_t$", xlabel="step", yscale="log")
    rms.set_title(TENSOR, loc="right", fontsize=6)
    figure.legend(*loss.get_legend_handles_labels(), loc="outside lower left")


def command() -> None:
    """Parses the command line: all keys that are not in ReplayConfig are changes to the run."""
    arguments = parse_command()
    own_keys = {f.name for f in fields(ReplayConfig)}
    overrides = [text for text in arguments.overrides if not text.startswith("hydra")]
    changes = [text for text in overrides if text.partition("=")[0] not in own_keys]
    dropped = {*changes, "-m", "--multirun"}
    sys.argv[1:] = [text for text in sys.argv[1:] if text not in dropped]
    run_command(partial(main, changes=changes, multirun=arguments.multirun), "replay", ReplayConfig)


if __name__ == "__main__":
    command()
