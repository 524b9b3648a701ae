"""Claims C12 and C13 of the paper, on loss scales and the schedule of beta2, judged by runs."""

import numpy as np
import pandas as pd

from analysis import spike_marks
from analysis.evidence import Evidence, lacking, outcomes, wilson
from analysis.load import Runs
from analysis.verdicts import UNDECIDED, Claim, Finding, decide
from lowprec.diagnostics.spikes import loss_spikes

STUDY = "loss_scaler"


def _falls(evidence: Evidence) -> Finding:
    """Judges whether a dynamic scale falls at loss spikes more often than anywhere else."""
    runs, steps = _steps(evidence, "dynamic")
    num_spikes, falls = int(steps["spike"].sum()), steps[steps["falls"]]
    if not num_spikes:
        return Finding(f"no loss spike in {_count(steps)}", UNDECIDED, "nothing spiked")
    seeds = steps.loc[steps["spike"], "seed"].nunique()
    if falls.empty:
        ours = f"{num_spikes} loss spikes, the scale never falls ({_count(steps)})"
        return decide(ours, False, seeds, runs.runs)
    num, total = int(falls["near"].sum()), len(falls)
    chance = falls["run"].map(steps.groupby("run")["near"].mean()).mean()
    low, high = wilson(num, total)
    ours = (
        f"{num} of {total} falls of the scale are at one of {num_spikes} loss spikes "
        f"({num / total:.0%} [{low:.0%}, {high:.0%}]), by chance {chance:.1%} ({_count(steps)})"
    )
    holds = True if low > chance else False if high <= chance else None
    return decide(ours, holds, seeds, runs.runs, "the interval holds chance")


def _skips(evidence: Evidence) -> Finding:
    """Judges whether a run with a fixed scale goes on, by skips of single tensors."""
    runs, steps = _steps(evidence, "fixed")
    heads = runs.runs
    ended, num_spikes = int((heads["state"] == "finished").sum()), int(steps["spike"].sum())
    skipping = steps[steps["skipped"] > 0]
    is_single = skipping["skipped"] < skipping["tensors"]
    ours = (
        f"{ended} of {len(heads)} runs go on to the end; {num_spikes} loss spikes; in "
        f"{len(skipping)} steps a tensor is skipped, in {int(is_single.sum())} of them not all, "
        f"{int(skipping['near'].sum())} at a loss spike ({_count(steps)})"
    )
    seeds = skipping["seed"].nunique() if ended == len(heads) else heads["seed"].nunique()
    if ended < len(heads):
        return decide(ours, False, seeds, heads)
    if not num_spikes or skipping.empty:
        return Finding(ours, UNDECIDED, "no loss spike, or nothing was skipped")
    return decide(ours, True if is_single.any() else None, seeds, heads, "no single tensor skipped")


def _steps(evidence: Evidence, kind: str) -> tuple[Runs, pd.DataFrame]:
    """The runs with a scaler, and their steps after the ignored ones.

    A row a step: run, seed, `spike` (a loss spike begins), `near` (at most the protocol's `within`
    steps from one), `falls` (the scale does, those `within` steps after another left out),
    `skipped` tensors, and the number of `tensors` recorded.
    """
    runs = evidence.runs(STUDY, needed="mini")
    runs = Runs(runs.runs[runs.runs["scaler.name"] == kind])
    if not len(runs):
        raise lacking(f"scaler={kind}", STUDY, "mini")
    frames = []
    for head in runs.runs.to_dict("records"):
        protocol = spike_marks.protocol_of_run(head)
        alone = runs.only(head["run"])
        series = spike_marks.read_series(alone, head["run"])
        metrics = alone.metrics.set_index("step").reindex(range(1, len(series.loss) + 1))
        spikes = loss_spikes(series.loss, protocol)
        near = pd.Series(spikes).rolling(2 * protocol.within + 1, center=True, min_periods=1).max()
        scale = metrics.get("loss_scale", pd.Series(np.nan, metrics.index)).astype(float).ffill()
        at = np.flatnonzero(scale.diff() < 0)
        falls = np.zeros(len(spikes), dtype=bool)
        falls[at[np.diff(at, prepend=-np.inf) > protocol.within]] = True
        skipped = metrics.get("skipped_tensors", pd.Series(0.0, metrics.index)).fillna(0)
        columns = {"spike": spikes, "near": near.to_numpy() > 0, "falls": falls}
        frame = pd.DataFrame({**columns, "skipped": skipped.to_numpy()})
        facts = {"run": head["run"], "seed": head["seed"], "tensors": series.rms.shape[1]}
        frames.append(frame.assign(**facts).iloc[protocol.ignore_steps :])
    return runs, pd.concat(frames, ignore_index=True)


def _count(steps: pd.DataFrame) -> str:
    return f"{steps['run'].nunique()} runs, {steps['seed'].nunique()} seeds"


def _schedule(evidence: Evidence) -> Finding:
    runs = outcomes(evidence.runs("beta2_schedule", needed="mini"))
    parts = runs.groupby("optimizer.beta2_decay", dropna=False)["loss"].mean()
    named = {f"1 - t^-{k:g}" if k == k else "constant": v for k, v in parts.items()}
    ours = "; ".join(f"{name}: last loss {loss:.3g}" for name, loss in named.items())
    ours = f"{ours} ({len(runs)} runs, {runs['seed'].nunique()} seeds)"
    return Finding(ours, UNDECIDED, "the paper gives no number to compare")


CLAIMS = (
    Claim("C12", "a dynamic loss scale falls at spikes", "no number",
          "share of falls at loss spikes: interval above chance", _falls),
    Claim("C12", "with a fixed one that skips single tensors training goes on", "no number",
          "every run ends, single tensors are skipped, two seeds", _skips),
    Claim("C13", "beta2 = 1 - t^-lambda was tried (0.45, 0.5, 0.65)", "no number", "none",
          _schedule),
)  # fmt: skip
