"""Series of a run and the spikes in them, by the thresholds that the run was watched with."""

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase

import numpy as np
import pandas as pd

from analysis.load import Runs
from lowprec.diagnostics import spikes
from lowprec.diagnostics.spikes import PROTOCOLS, Protocol, leads, loss_spikes, rms_spikes

TENSOR = "visual.conv1.weight"  # the patch embedding
THRESHOLDS = {
    "rms_threshold": "RMS_t of an RMS spike",
    "loss_sigmas": "standard deviations of a deviation",
    "num_deviations": "deviations that make a loss spike",
    "within": "steps within which they come, and within which a spike counts once",
    "ignore_steps": "first steps ignored",
    "window": "steps of the running mean",
    "max_lead": "steps after an RMS spike within which a loss spike follows it",
}
FRACTIONS = ("rms_threshold", "loss_sigmas")  # the others are whole numbers
FOLLOWING, OTHER = "#D55E00", "#666666"  # a loss spike that follows an RMS spike, any other


@dataclass(frozen=True)
class Series:
    """Loss [steps] and RMS_t [steps, tensors] of one run; NaN where a step has none."""

    run: str
    loss: np.ndarray
    rms: pd.DataFrame

    def rms_of(self, pattern: str) -> np.ndarray:
        """[steps]: the largest RMS_t of the tensors that match."""
        chosen = [name for name in self.rms if fnmatchcase(name, pattern)]
        return np.fmax.reduce(self.rms[chosen].to_numpy(float), axis=1, initial=np.nan)


def protocol_of(head: dict) -> Protocol:
    """The protocol of a run's config; the paper's for a run that was not watched."""
    given = {field: head.get(f"diagnostics.spikes.{field}") for field in THRESHOLDS}
    given = {field: value for field, value in given.items() if not pd.isna(value)}
    whole = {field: int(value) for field, value in given.items() if field not in FRACTIONS}
    return spikes.protocol_of(head["diagnostics.spikes.protocol"], **(given | whole))


def of_adamw(heads: pd.DataFrame) -> pd.DataFrame:
    """Rows of `Runs.runs` without other optimizers' runs, where there are some of AdamW.

    Clipping changes how spikes come about: a share over several optimizers is of none of them.
    """
    names = heads.get("optimizer.name", pd.Series(None, index=heads.index, dtype=object))
    return heads[names.isna() | (names == "adamw")] if (names == "adamw").any() else heads


def read_series(runs: Runs, run: str, pattern: str = "*") -> Series:
    """The series of one run over its steps up to the last that has a row."""
    metrics = runs.metrics[runs.metrics["run"] == run].set_index("step")
    last = 0 if metrics.empty else int(metrics.index.max())
    steps = pd.RangeIndex(1, last + 1, name="step")
    try:
        rms = runs.tensors(pattern, "rms")
        rms = rms[rms["run"] == run].drop(columns="run").drop_duplicates("step", keep="last")
        rms = rms.set_index("step").reindex(steps)
    except LookupError:
        rms = pd.DataFrame(index=steps)
    return Series(run, metrics["loss"].astype(float).reindex(steps).to_numpy(), rms)


def mark(series: Series, protocol: Protocol, tensor: str) -> pd.DataFrame:
    """A row a step: loss, rms, loss_spike and rms_spike (one begins here), lead, follows.

    `lead`: of a loss spike, steps since the latest RMS spike, NaN without one; `follows`: it is at
    most the protocol's `max_lead`.
    """
    rms = series.rms_of(tensor)
    loss_at, rms_at = loss_spikes(series.loss, protocol), rms_spikes(rms, protocol)
    at = np.flatnonzero(loss_at)
    lead = np.full(len(rms), np.nan)
    lead[at] = leads(at, np.flatnonzero(rms_at))
    columns = {"loss": series.loss, "rms": rms, "loss_spike": loss_at, "rms_spike": rms_at}
    columns |= {"lead": lead, "follows": lead <= protocol.max_lead}
    return pd.DataFrame({"step": np.arange(1, len(rms) + 1), **columns})


def protocols(frame: pd.DataFrame) -> list[Protocol]:
    """The protocols of a frame that has the columns THRESHOLDS, each once."""
    rows = frame[list(THRESHOLDS)].drop_duplicates().to_dict("records")
    return [
        Protocol(**{k: float(v) if k in FRACTIONS else int(v) for k, v in row.items()})
        for row in rows
    ]


def in_words(frame: pd.DataFrame) -> str:
    """What counts as a spike in this frame, and whether that is as in the paper."""
    used = protocols(frame)
    texts = [
        f"RMS spikes: RMS_t >= {p.rms_threshold:g}. Loss spikes: {p.num_deviations} losses within "
        f"{p.within} steps above the mean + {p.loss_sigmas:g} standard deviations of the "
        f"{p.window} steps before. The first {p.ignore_steps:,} steps have neither."
        for p in used
    ]
    paper = asdict(PROTOCOLS["paper"])
    changed = sorted({k for p in used for k, v in asdict(p).items() if v != paper[k]} - {"window"})
    note = " The paper names no window."
    if changed:
        note = f" As in the paper but for {', '.join(changed)}.{note}"
    return " Of other runs: ".join(texts) + note
