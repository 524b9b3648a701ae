"""Compares replays with each other and with the run's record: table and verdict."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.figures.replays import CONTROL, PERTURBED, STAYS, UNCHANGED
from lowprec.config.check import RunError
from lowprec.diagnostics.spikes import Protocol
from lowprec.runs import durable

BEFORE = 20  # recorded steps before the spike that show how much losses scatter
LEGEND = f"""\
lead: steps from the change to the spike; height: the largest loss around the spike minus the median
before; of_control: relative to the unchanged replay's; gone: that is less than {STAYS:.0%};
perturbed: weights changed in their last digit, as a measure of chance; exact: has exactly the
recorded losses."""


class Replay(NamedTuple):
    """What a replay changes, from which step on."""

    change: str  # overrides, or CONTROL, PERTURBED or UNCHANGED (from a state of the control)
    change_from: int
    perturbation: int | None = None  # its seed


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
    stem: Path,
    step: int,
    recorded: pd.Series,
    frames: dict[Replay, pd.DataFrame],
    protocol: Protocol,
) -> str:
    """Writes `<stem>.csv`, every step, and `<stem>_table.csv`; returns the text to print."""
    control = next(iter(frames.values()))
    record = recorded.rename_axis("step").rename("loss").reset_index()
    record = record[record["step"].isin(control["step"])]
    named = [frame.assign(**replay._asdict()) for replay, frame in frames.items()]
    curves = pd.concat([record.assign(change="recorded"), *named], ignore_index=True)
    curves = curves.astype({"change_from": "Int64", "perturbation": "Int64"})
    compared = table(frames, step, protocol, recorded)
    stem.parent.mkdir(exist_ok=True)
    for ending, frame in ((".csv", curves), ("_table.csv", compared)):
        text = frame.to_csv(index=False, lineterminator="\n")
        durable.replace(stem.with_name(stem.name + ending), text.encode())
    shown = compared.astype({"perturbation": float, "exact": object})
    shown.loc[~shown["change"].isin([CONTROL, UNCHANGED]), "exact"] = math.nan
    text = shown.to_string(index=False, float_format=lambda value: f"{value:.4g}", na_rep="-")
    return f"{text}\n{LEGEND}\n{verdict(recorded, compared, step, protocol)}\nWrote {stem}.csv"


def table(
    frames: dict[Replay, pd.DataFrame], step: int, protocol: Protocol, recorded: pd.Series
) -> pd.DataFrame:
    """Compares the replays in a table with one row each, the control first.

    Columns: `step`; `change`, `change_from` and `perturbation` of the replay; `lead`, steps from
    `change_from` to `step`; `loss` at the step; `peak`, the largest loss from `protocol.within`
    steps before it on, since a change may shift a spike; `height`, the peak minus the median loss
    of all steps before `step`, both of the control up to the change; `of_control`, the height
    relative to the control's; `gone`, whether that is less than STAYS; `rms`, the largest RMS_t;
    `exact`, whether an unchanged replay from `change_from` has exactly the recorded losses. The
    height is infinite if the replay ended early or has a non-finite loss.
    """
    rows, exact = [], {}
    control = next(iter(frames.values())).set_index("step")["loss"]
    for replay, frame in frames.items():
        losses = frame.set_index("step")["loss"]
        if replay.change in (CONTROL, UNCHANGED):
            expected = recorded.reindex(losses.index)
            exact[replay.change_from] = (losses.map(repr) == expected.map(repr)).all()
        path = pd.concat([control.loc[: replay.change_from - 1], losses])
        around = path.loc[step - protocol.within :]
        peak = around.where(around.abs() < math.inf, math.inf).max() if len(around) else math.inf
        height = peak if math.isinf(peak) else peak - path.loc[: step - 1].median()
        numbers = {"lead": step - replay.change_from, "loss": losses.get(step), "peak": peak}
        numbers |= {"height": height, "rms": frame["rms"].max()}
        rows.append({"step": step, **replay._asdict(), **numbers})
    compared = pd.DataFrame(rows).astype({"perturbation": "Int64"})
    highest = compared["height"].iloc[0]
    with np.errstate(divide="ignore"):  # a control without any rise
        shares = [
            1.0 if height == highest else 0.0 if math.isinf(highest) else height / highest
            for height in compared["height"]
        ]
    compared.insert(8, "of_control", shares)
    compared.insert(9, "gone", compared["of_control"] < STAYS)
    return compared.assign(exact=compared["change_from"].map(exact).astype(bool))


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
    changed = compared[~compared["change"].isin([CONTROL, UNCHANGED])]
    starts, lines = changed["change_from"].unique(), []
    for start in starts:
        lines += [f"Changes from step {start} on:"] if len(starts) > 1 else []
        lines += _outcomes(changed[changed["change_from"] == start])
    return "\n".join(lines)


def _outcomes(changed: pd.DataFrame) -> list[str]:
    """Sentences on the replays with changes from one step on."""
    is_perturbed, lines = changed["change"] == PERTURBED, []
    if is_perturbed.any():
        stays = (~changed.loc[is_perturbed, "gone"]).sum()
        lines.append(
            f"With weights perturbed in their last digit, the spike stays in {stays} of "
            f"{is_perturbed.sum()} replays"
            + ("." if stays == is_perturbed.sum() else ", so it may also be gone by chance.")
        )
    variants = changed[~is_perturbed]
    for outcome, has_it in (("is gone", variants["gone"]), ("stays", ~variants["gone"])):
        names = ", ".join(variants["change"][has_it])
        lines.append(f"The spike {outcome} with: {names or 'no change'}.")
    return lines
