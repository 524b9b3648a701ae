"""What the report shows of one run: numbers for its tables, curves thinned to a bounded size.

Thinning keeps, of each bucket of steps, those of the smallest and the largest loss and of the
largest RMS_t, and every step around the spikes that are listed: no spike is thinned away.
"""

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.load import Runs
from analysis.spike_marks import Series, protocol_of_run, read_series, spike_table
from analysis.style import smooth, smoothing_width
from lowprec.diagnostics.spikes import (
    PROTOCOLS,
    LagCoincidence,
    Protocol,
    lag_coincidence,
    loss_spikes,
    rms_spikes,
)

AROUND = 40  # steps kept whole on either side of a listed spike
MAX_ROWS = 40  # of a heat map; more tensors are joined by layer
LOW, HIGH = 0.1, 10.0  # RMS_t at the ends of a heat map's codes
_BLOCK = re.compile(r"(visual\.)?transformer\.resblocks\.(\d+)\.")
_FIRST = ("conv1", "class_embedding", "token_embedding", "positional_embedding", "ln_pre")


@dataclass(frozen=True)
class Budget:
    """How much of each run the page may hold."""

    points: int  # buckets of a curve, about
    spikes: int  # listed
    heat_bytes: int


@dataclass(frozen=True)
class Heat:
    """RMS_t over rows (tensors or layers) and buckets of steps: codes uint8 [rows, columns].

    Code 0 is no number; 1 to 255 go from LOW to HIGH in equal ratios.
    """

    rows: list[str]
    steps: list[int]
    codes: np.ndarray


@dataclass(frozen=True)
class Cell:
    """One run: its row of `Runs.runs`, curves over `steps`, spikes and speed."""

    head: dict
    curves: pd.DataFrame  # step, loss, rms of the tensor chosen, max of all
    smooth: pd.DataFrame  # the same, averaged
    thinned: bool
    final_loss: float
    scores: dict[str, float]  # of the last evaluation
    spikes: pd.DataFrame
    num_rms_spikes: int
    protocol: Protocol
    following: LagCoincidence
    heat: Heat | None
    speed: dict


def read_cell(runs: Runs, tensor: str, budget: Budget) -> Cell:
    """Reads and condenses `runs`, which holds one run."""
    head = runs.runs.to_dict("records")[0]
    known = "diagnostics.spikes.protocol" in head  # not if every config is damaged
    protocol = protocol_of_run(head) if known else PROTOCOLS["paper"]
    series = read_series(runs, head["run"])
    loss_at = loss_spikes(series.loss, protocol)
    rms_at = rms_spikes(series.rms_of(tensor), protocol)
    marked = (
        series
        if loss_at.any()
        else Series(series.run, series.loss, series.rms.iloc[:, :0], series.beta2)
    )
    spikes = spike_table(marked, protocol, tensor).sort_values("height", ascending=False)
    listed = spikes["step"].head(budget.spikes).tolist()
    width = smoothing_width(len(series.loss))
    curves = pd.DataFrame(
        {"loss": series.loss, "rms": series.rms_of(tensor), "max": series.rms_of("*")}
    )
    smoothed = curves.apply(smooth, width=width).astype(np.float32)
    curves = curves.astype(np.float32)
    for frame in (curves, smoothed):
        frame.insert(0, "step", np.arange(1, len(frame) + 1, dtype=np.int32))
    kept = thin(curves, budget.points, listed)
    finite = series.loss[np.isfinite(series.loss)]
    return Cell(
        head=head,
        curves=curves.iloc[kept],
        smooth=smoothed.iloc[:: max(1, -(-2 * len(curves) // budget.points))],
        thinned=len(kept) < len(curves),
        final_loss=float(finite[-width:].mean()) if len(finite) else np.nan,
        scores=_scores(runs.metrics),
        spikes=spikes,
        num_rms_spikes=int(rms_at.sum()),
        protocol=protocol,
        following=lag_coincidence(loss_at, rms_at, protocol),
        heat=heat_of(series.rms, budget.heat_bytes),
        speed=speed_of(runs.timing),
    )


def thin(curves: pd.DataFrame, points: int, spikes: list[int]) -> np.ndarray:
    """Which rows are kept: all if they are at most `points`, else as this module's first lines say.

    `spikes`: steps around which all are kept.
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
    """The largest RMS_t of each row and bucket in about `size` bytes; None without a number."""
    recorded = rms.dropna(how="all")
    if recorded.empty or not len(recorded.columns):
        return None
    names = list(rms) if len(rms.columns) <= MAX_ROWS else [layer_of(name) for name in rms]
    rows = sorted(set(names), key=_depth)
    columns = min(max(20, size // len(rows)), 400, len(recorded))
    starts = np.linspace(0, len(recorded), columns, endpoint=False).astype(int)
    largest = np.fmax.reduceat(recorded.to_numpy(np.float32), starts, axis=0)
    joined = np.full((len(rows), columns), np.nan, np.float32)
    for name, values in zip(names, largest.T, strict=True):
        row = rows.index(name)
        joined[row] = np.fmax(joined[row], values)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.log(joined / LOW) / np.log(HIGH / LOW)
    codes = np.where(np.isnan(share), 0, 1 + 254 * np.clip(share, 0, 1)).round().astype(np.uint8)
    return Heat(rows, recorded.index[starts].tolist(), codes)


def layer_of(tensor: str) -> str:
    """`visual.transformer.resblocks.3` of one of its tensors; other tensors without `.weight`."""
    block = _BLOCK.match(tensor)
    if block:
        return block.group(0).removesuffix(".")
    return re.sub(r"\.(weight|bias)$", "", tensor)


def _depth(name: str) -> tuple:
    """Sort key from input to output: the image tower, the text tower, what joins them."""
    block = _BLOCK.match(f"{name}.")
    tower = 0 if name.startswith("visual.") else 2 if name.startswith("logit") else 1
    if block:
        return tower, 1, int(block.group(2)), name
    first = [i for i, part in enumerate(_FIRST) if part in name]
    return (tower, 0, first[0], name) if first else (tower, 2, 0, name)


def speed_of(timing: pd.DataFrame) -> dict:
    """Medians over the run, so that compiling and pauses do not count; NaN where not recorded."""

    def numbers(name: str) -> np.ndarray:
        if name not in timing:
            return np.array([])
        return pd.to_numeric(timing[name], errors="coerce").dropna().to_numpy(float)

    def median(name: str) -> float:
        return float(np.median(numbers(name))) if len(numbers(name)) else np.nan

    memory = numbers("memory_gib")
    wall = []
    if {"attempt", "wall_s"} <= set(timing):  # the clock of each attempt starts at 0
        seconds = timing.assign(wall_s=pd.to_numeric(timing["wall_s"], errors="coerce"))
        wall = seconds.groupby("attempt")["wall_s"].max().dropna()
    return {
        "images_per_s": median("images_per_s"),
        "step_ms": median("step_ms"),
        "data_wait": median("data_wait"),
        "memory_gib": float(memory.max()) if len(memory) else np.nan,
        "hours": float(sum(wall)) / 3600 if len(wall) else np.nan,
        "attempts": len(wall),
    }


def _scores(metrics: pd.DataFrame) -> dict[str, float]:
    """The last value of each evaluation, by name."""
    named = [name for name in metrics if "/" in name]
    return {name: float(metrics[name].dropna().iloc[-1]) for name in named if metrics[name].any()}
