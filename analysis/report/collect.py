"""Condenses each run for the report: numbers for its tables, and curves of bounded size.

Thinning keeps, for each bucket of steps, the smallest and largest loss and the largest RMS_t, and
all steps around the listed spikes: no spike is lost.
"""

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.load import Runs
from analysis.spike_marks import (
    Series,
    count_following,
    protocol_of_run,
    read_series,
    spike_table,
)
from analysis.style import smooth, smoothing_width
from lowprec.diagnostics.spikes import Protocol, loss_spikes, rms_spikes

AROUND = 40  # steps kept in full on either side of a listed spike
MAX_ROWS = 40  # of a heat map; more tensors are grouped by layer
LOW, HIGH = 0.1, 10.0  # RMS_t at the ends of a heat map's scale
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.")
_FIRST = ("conv1", "class_embedding", "token_embedding", "positional_embedding", "ln_pre")


@dataclass(frozen=True)
class Budget:
    """Limits on what the page holds for each run."""

    points: int  # approximate number of points in a curve
    spikes: int  # listed
    heat_bytes: int


@dataclass(frozen=True)
class Heat:
    """RMS_t over rows (tensors or layers) and buckets of steps.

    `codes` is uint8 [rows, buckets]: 0 means no number, 1 to 255 go from LOW to HIGH in equal
    ratios.
    """

    rows: list[str]
    steps: list[int]
    codes: np.ndarray


@dataclass(frozen=True)
class RunData:
    """One run: its row of `Runs.runs`, curves over steps, spikes and speed."""

    summary: dict
    curves: pd.DataFrame  # step, loss, rms (of the selected tensor), max (of all tensors)
    smooth: pd.DataFrame  # the same, averaged
    is_thinned: bool
    final_loss: float
    scores: dict[str, float]  # of the last evaluation
    spikes: pd.DataFrame
    num_rms_spikes: int
    reaches_threshold: bool
    protocol: Protocol
    following: dict[str, float]
    heat: Heat | None
    speed: dict[str, float]

    @property
    def last_step(self) -> int:
        """The last step with a row; 0 without any."""
        return int(self.curves["step"].max()) if len(self.curves) else 0

    @property
    def needs_attention(self) -> bool:
        """Whether the run has not finished, or is damaged on disk."""
        return self.summary["state"] != "finished" or bool(self.summary["note"])


def collect_run(runs: Runs, tensor: str, budget: Budget) -> RunData:
    """Reads and condenses `runs`, which holds one run. `tensor` is the glob of RMS_t's tensors."""
    summary = runs.runs.to_dict("records")[0]
    protocol = protocol_of_run(summary)
    series = read_series(runs, summary["run"])
    rms = series.rms_of(tensor)
    has_spikes = loss_spikes(series.loss, protocol).any()
    tensors = series.rms if has_spikes else series.rms.iloc[:, :0]
    spikes = spike_table(Series(series.run, series.loss, tensors, series.beta2), protocol, tensor)
    spikes = spikes.sort_values("height", ascending=False)
    width = smoothing_width(len(series.loss))
    curves = pd.DataFrame({"loss": series.loss, "rms": rms, "max": series.rms_of("*")})
    smoothed = curves.apply(smooth, width=width).astype(np.float32)
    curves = curves.astype(np.float32)
    for frame in (curves, smoothed):
        frame.insert(0, "step", np.arange(1, len(frame) + 1, dtype=np.int32))
    kept = thin(curves, budget.points, spikes["step"].head(budget.spikes).tolist())
    finite = series.loss[np.isfinite(series.loss)]
    return RunData(
        summary=summary,
        curves=curves.iloc[kept],
        smooth=smoothed.iloc[:: max(1, -(-2 * len(curves) // budget.points))],
        is_thinned=len(kept) < len(curves),
        final_loss=float(finite[-width:].mean()) if len(finite) else np.nan,
        scores=_scores(runs.metrics),
        spikes=spikes,
        num_rms_spikes=int(rms_spikes(rms, protocol).sum()),
        reaches_threshold=series.reaches(protocol),
        protocol=protocol,
        following=count_following(series, rms, protocol),
        heat=heat_of(series.rms, budget.heat_bytes),
        speed=speed_of(runs.timing),
    )


def thin(curves: pd.DataFrame, points: int, spikes: list[int]) -> np.ndarray:
    """Row numbers of the steps to keep: all of them if there are at most `points`.

    All steps around `spikes` are kept; the docstring of this module describes the rest.
    """
    num_steps = len(curves)
    if num_steps <= points:
        return np.arange(num_steps)
    edges = np.linspace(0, num_steps, max(2, points // 4) + 1).astype(int)
    kept = {0, num_steps - 1}
    loss = curves["loss"].to_numpy()
    extremes = [np.where(np.isfinite(loss), sign * loss, -np.inf) for sign in (1, -1)]
    extremes += [np.nan_to_num(curves[name].to_numpy(), nan=-np.inf) for name in ("rms", "max")]
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        kept.update(first + int(values[first:last].argmax()) for values in extremes)
    kept.update(np.flatnonzero(np.diff(np.isnan(loss))).tolist())  # a gap stays a gap
    for step in spikes:
        kept.update(range(max(0, step - 1 - AROUND), min(num_steps, step + AROUND)))
    return np.array(sorted(kept))


def heat_of(rms: pd.DataFrame, size: int) -> Heat | None:
    """The largest RMS_t for each row and bucket, about `size` bytes in all; None if unrecorded."""
    recorded = rms.dropna(how="all")
    if recorded.empty or not len(recorded.columns):
        return None
    names = list(rms) if len(rms.columns) <= MAX_ROWS else [layer_of(name) for name in rms]
    rows = sorted(set(names), key=_depth)
    columns = min(max(20, size // len(rows)), 400, len(recorded))
    starts = np.linspace(0, len(recorded), columns, endpoint=False).astype(int)
    largest = np.fmax.reduceat(recorded.to_numpy(np.float32), starts, axis=0)
    grouped = np.full((len(rows), columns), np.nan, np.float32)
    for name, values in zip(names, largest.T, strict=True):
        row = rows.index(name)
        grouped[row] = np.fmax(grouped[row], values)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.log(grouped / LOW) / np.log(HIGH / LOW)
    codes = np.where(np.isnan(share), 0, 1 + 254 * np.clip(share, 0, 1)).round().astype(np.uint8)
    return Heat(rows, recorded.index[starts].tolist(), codes)


def layer_of(tensor: str) -> str:
    """`visual.transformer.resblocks.3` for its tensors; other tensors without `.weight`."""
    block = _BLOCK.match(tensor)
    if block:
        return block.group(0).removesuffix(".")
    return re.sub(r"\.(weight|bias)$", "", tensor)


def _depth(name: str) -> tuple:
    """Sort key from input to output: the image tower, the text tower, the logit scale."""
    block = _BLOCK.match(f"{name}.")
    tower = 0 if name.startswith("visual.") else 2 if name.startswith("logit") else 1
    if block:
        return tower, 1, int(block.group(2)), name
    first = [i for i, part in enumerate(_FIRST) if part in name]
    return (tower, 0, first[0], name) if first else (tower, 2, 0, name)


def speed_of(timing: pd.DataFrame) -> dict[str, float]:
    """Medians over a run, which ignore compilation and pauses; NaN if not recorded."""

    def numbers(name: str) -> pd.Series:
        column = timing.get(name, pd.Series(dtype=float))
        return pd.to_numeric(column, errors="coerce").dropna()

    seconds = numbers("wall_s")  # each attempt starts at 0
    wall = seconds.groupby(timing["attempt"]).max() if "attempt" in timing else seconds[:0]
    return {
        **{name: numbers(name).median() for name in ("images_per_s", "step_ms", "data_wait")},
        "memory_gib": numbers("memory_gib").max(),
        "hours": wall.sum() / 3600 if len(wall) else np.nan,
        "attempts": len(wall),
    }


def _scores(metrics: pd.DataFrame) -> dict[str, float]:
    """The last value of each evaluation, by name."""
    names = [name for name in metrics if "/" in name]
    return {name: float(metrics[name].dropna().iloc[-1]) for name in names if metrics[name].any()}
