"""What a replay shows: a table of the changes, every step as CSV, a figure."""

import io
import math
import statistics
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from analysis import style
from analysis.spike_marks import TENSOR
from lowprec.diagnostics.spikes import Protocol
from lowprec.runs import durable

QUESTIONS = {  # what a change of a key asks about
    "data": ("skip_batches", "data", "seed", "batch_size"),
    "optimizer": ("optimizer", "schedule", "num_steps"),
    "numerics": ("precision", "scaler", "compile", "checkpointing", "device", "deterministic"),
}
STAYS = 0.5  # of the control's height, and the spike is still there
BEFORE = 20  # recorded steps that say how much the loss scatters
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def report(
    run: Path,
    step: int,
    recorded: dict[int, float],
    replayed: dict[str, list[dict]],
    stem: Path,
    protocol: Protocol,
) -> str:
    """Writes `<stem>.csv`, `<stem>_table.csv` and `<stem>.png`; returns what is to be said.

    `protocol`: what the run counted as a spike.
    """
    frames = {name: pd.DataFrame(rows) for name, rows in replayed.items()}
    record = pd.DataFrame({"step": list(recorded), "loss": list(recorded.values())})
    around = frames["control"]["step"]
    record = record[record["step"].between(around.min(), around.max())]
    every = pd.concat([frame.assign(change=name) for name, frame in frames.items()])
    every = pd.concat([record.assign(change="recorded"), every])[["change", "step", "loss", "rms"]]
    shown = table(frames, step, protocol)
    stem.parent.mkdir(exist_ok=True)
    for ending, frame in ((".csv", every), ("_table.csv", shown)):
        text = frame.to_csv(index=False, lineterminator="\n")
        durable.replace(stem.with_name(stem.name + ending), text.encode())
    with style.style():
        figure, picture = Figure(layout="constrained"), io.BytesIO()
        draw(figure, frames, record, step, run.resolve().name)
        figure.savefig(picture, format="png")
    durable.replace(stem.with_name(stem.name + ".png"), picture.getvalue())
    text = shown.to_string(index=False, float_format=lambda value: f"{value:.4g}", na_rep="-")
    return f"{text}\n{verdict(recorded, shown, step, protocol)}\nWrote {stem}.png"


def table(frames: dict[str, pd.DataFrame], step: int, protocol: Protocol) -> pd.DataFrame:
    """A row a replay: what it asks about, loss at the step, peak, height, RMS_t.

    `peak`: largest loss around the step, as a change may move a spike; `height`: peak - median loss
    of all steps before, `of_control` its share of the control's; `rms`: the largest RMS_t of all
    steps. A loss that is not finite is infinitely high.
    """
    rows, whole = [], height(frames["control"], step, protocol)
    for name, frame in frames.items():
        at, mine = frame[frame["step"] == step]["loss"], height(frame, step, protocol)
        share = 1.0 if mine == whole else 0.0 if math.isinf(whole) else mine / whole
        rows.append(
            {
                "change": name,
                "question": question(name),
                "loss": at.iloc[0] if len(at) else math.nan,
                "peak": peak(frame, step, protocol),
                "height": mine,
                "of_control": share,
                "rms": frame["rms"].max(),
            }
        )
    return pd.DataFrame(rows)


def peak(frame: pd.DataFrame, step: int, protocol: Protocol) -> float:
    """Largest loss at most `protocol.within` steps from a step; inf where one is not finite."""
    around = frame[(frame["step"] - step).abs() <= protocol.within]["loss"]
    # none: it ended, as not finite, before
    return max((x if math.isfinite(x) else math.inf for x in around), default=math.inf)


def height(frame: pd.DataFrame, step: int, protocol: Protocol) -> float:
    """`peak` over the median loss of the steps before."""
    highest = peak(frame, step, protocol)
    if math.isinf(highest):
        return highest
    return highest - statistics.median(frame[frame["step"] < step]["loss"])


def question(change: str) -> str:
    """`data`, `optimizer`, `numerics` or several, by the keys of a change; "-" for none."""
    groups = [text.partition("=")[0].partition(".")[0] for text in change.split()]
    found = [name for name, keys in QUESTIONS.items() if set(groups) & set(keys)]
    others = set(groups) - {"control"} - {key for keys in QUESTIONS.values() for key in keys}
    return "+".join([*found, *(["model or other"] if others else [])]) or "-"


def verdict(recorded: dict[int, float], shown: pd.DataFrame, step: int, protocol: Protocol) -> str:
    """Under which changes the spike is gone and under which it is there, a line each."""
    before = [recorded[number] for number in range(step - BEFORE, step) if number in recorded]
    noise = protocol.loss_sigmas * statistics.pstdev(before)
    whole = shown["height"].iloc[0]
    if not whole > noise:
        return (
            f"No spike around step {step}: the loss rises by {whole:.3g}, and "
            f"{protocol.loss_sigmas:g} standard deviations of the {len(before)} steps before are "
            f"{noise:.3g}."
        )
    is_gone, lines = shown["of_control"] < STAYS, []
    for said, chosen in (("gone", is_gone), ("there", ~is_gone)):
        rows = shown[chosen & (shown["change"] != "control")].to_dict("records")
        named = ", ".join(f"{row['question']} ({row['change']})" for row in rows)
        lines.append(f"The spike is {said} under: {named or 'none of them'}.")
    return "\n".join([*lines, f"Gone: lower than {STAYS:.0%} of the control's height."])


def draw(
    figure: Figure, frames: dict[str, pd.DataFrame], record: pd.DataFrame, step: int, title: str
) -> None:
    """Loss over RMS_t of the patch embedding, a line a replay; the recorded losses as dots."""
    figure.set_size_inches(style.COLUMN_WIDTH, 3.6 + 0.12 * len(frames))
    loss, rms = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    loss.plot(record["step"], record["loss"], "o", color=style.OTHER, ms=3, label="recorded")
    for number, (name, frame) in enumerate(frames.items()):
        color = COLORS[(number - 1) % len(COLORS)] if number else "#000000"
        for axes, column in ((loss, "loss"), (rms, "rms")):
            finite = frame[column].where(frame[column].abs() < math.inf)
            width = 0.9 if number else 1.8  # what equals the control lies on it
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
