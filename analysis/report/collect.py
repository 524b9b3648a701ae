"""Condenses each run for the report: numbers for its tables, and curves of bounded size.

Thinning keeps, for each bucket of steps, the smallest and largest loss and the largest RMS_t, and
all steps around the listed spikes: no spike is lost.
"""

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis import measures, spike_marks
from analysis.load import Runs
from analysis.run_files import as_path
from lowprec.diagnostics.spikes import Protocol, rms_spikes

SPIKING = ("rms", "max", "grad_norm")  # curves whose largest values are kept
AROUND = 40  # steps kept in full on either side of a listed spike


@dataclass(frozen=True)
class RunData:
    """One run: its row of `Runs.runs`, curves over steps, spikes and speed."""

    summary: dict
    whole: pd.DataFrame  # step, loss, rms (of the selected tensor), max (of all), grad_norm, lr
    curves: pd.DataFrame  # the same, thinned
    final_loss: float
    scores: dict[str, float]  # of the last evaluation
    accuracy: pd.Series  # the first score of each evaluation, by step
    spikes: pd.DataFrame
    num_rms_spikes: int | None  # None if RMS_t cannot reach the threshold or is not recorded
    num_coinciding: int  # loss spikes at the very step of an RMS spike
    protocol: Protocol
    following: dict[str, float]
    speed: dict[str, float]
    unexamined: str  # why no loss was examined for spikes, or ""
    unrecorded: str  # which tensor has no RMS_t, and what to choose, or ""
    can_replay: bool  # whether it has checkpoints
    verdict: str  # "collapsed" or "not learning" if the loss stayed at chance, or ""
    collapse: str  # what was said of that

    @property
    def needs_attention(self) -> bool:
        """Whether the run failed, stopped, is at chance level or is damaged."""
        notes = self.summary["note"].split("; ")
        is_damaged = any(note and not note.startswith("running: ") for note in notes)
        is_ended = self.summary["state"] not in ("finished", "running")
        return bool(is_ended or is_damaged or self.collapse)


def collect_run(runs: Runs, tensor: str, points: int, num_listed: int) -> RunData:
    """Reads and condenses `runs`, which holds one run. `tensor` is the glob of RMS_t's tensors.

    A curve has about `points` points, and those around `num_listed` spikes.
    """
    summary = runs.runs.to_dict("records")[0]
    protocol = spike_marks.protocol_of_run(summary)
    series = spike_marks.read_series(runs)
    rms = series.rms_of(tensor)
    spikes = spike_marks.spike_table(series, protocol, tensor)
    spikes = spikes.sort_values("height", ascending=False)
    curves = {"loss": series.loss, "rms": rms, "max": series.rms_of("*")}
    metrics = runs.metrics.drop_duplicates("step", keep="last").set_index("step")
    for name in ("grad_norm", "lr"):
        if name in metrics:
            curves[name] = metrics[name].reindex(range(1, len(rms) + 1)).to_numpy()
    curves = pd.DataFrame(curves, dtype=np.float32)
    curves.insert(0, "step", np.arange(1, len(curves) + 1, dtype=np.int32))
    rows = thin(curves, points, spikes["step"].head(num_listed).tolist())
    scores = {name: metrics[name].dropna() for name in metrics if "/" in name}
    unrecorded = spike_marks.why_unrecorded(series, protocol, tensor)
    counts = not (unrecorded or spike_marks.why_unreachable(series.beta2, protocol))
    verdict, collapse = spike_marks.collapse_of(summary, series.loss)
    return RunData(
        summary=summary,
        whole=curves,
        curves=curves.iloc[rows],
        final_loss=measures.final_loss(series.loss),
        scores={name: float(values.iloc[-1]) for name, values in scores.items() if len(values)},
        accuracy=next(iter(scores.values()), metrics["loss"].iloc[:0]),
        spikes=spikes,
        num_rms_spikes=int(rms_spikes(rms, protocol).sum()) if counts else None,
        num_coinciding=spike_marks.num_coinciding(spikes, rms, protocol),
        protocol=protocol,
        following=spike_marks.count_following(series, rms, protocol),
        speed=speed_of(runs.timing),
        unexamined=series.why_unexamined(protocol),
        unrecorded=unrecorded,
        can_replay=any(as_path(summary["path"]).glob("*/step_*")),
        verdict=verdict,
        collapse=collapse,
    )


def thin(curves: pd.DataFrame, points: int, spikes: list[int]) -> np.ndarray:
    """Row numbers of the steps to keep: all of them if there are at most `points`.

    All steps around `spikes` are kept; the docstring of this module describes the rest.
    """
    num_steps = len(curves)
    if num_steps <= points:
        return np.arange(num_steps)
    edges = np.linspace(0, num_steps, max(2, points // 4) + 1).astype(int)
    rows = {0, num_steps - 1}
    loss = curves["loss"].to_numpy()
    extremes = [np.where(np.isfinite(loss), sign * loss, -np.inf) for sign in (1, -1)]
    extremes += [
        np.nan_to_num(curves[name].to_numpy(), nan=-np.inf) for name in SPIKING if name in curves
    ]
    for first, last in zip(edges[:-1], edges[1:], strict=True):
        rows.update(first + int(values[first:last].argmax()) for values in extremes)
    rows.update(np.flatnonzero(np.diff(np.isnan(loss))).tolist())  # a gap stays a gap
    for step in spikes:
        rows.update(range(max(0, step - 1 - AROUND), min(num_steps, step + AROUND)))
    return np.array(sorted(rows))


def readable(tensor: str) -> str:
    """`image block 3 mlp.c_fc.weight` for `visual.transformer.resblocks.3.mlp.c_fc.weight`."""
    tensor = tensor.replace("visual.transformer.resblocks.", "image block ")
    tensor = tensor.replace("transformer.resblocks.", "text block ")
    return re.sub(r"(block \d+)\.", r"\1 ", tensor)


def speed_of(timing: pd.DataFrame) -> dict[str, float]:
    """Medians over a run, which ignore compilation and pauses; the peak of memory; NaN if unknown.

    `hours` is the time of all attempts, compilation and evaluation included.
    """
    columns = ["images_per_s", "data_wait", "memory_gib", "wall_s", "attempt"]
    timing = timing.reindex(columns=columns).apply(pd.to_numeric, errors="coerce")
    seconds = timing.groupby("attempt")["wall_s"].max()  # each attempt starts at 0
    return {
        **timing[["images_per_s", "data_wait"]].median(),
        "memory_gib": timing["memory_gib"].max(),
        "hours": seconds.sum(min_count=1) / 3600,
    }
