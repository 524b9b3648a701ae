"""The non-finite rule, read off the record."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Verdict:
    """`last`: rows that belong to the run; `reason`: why it diverged, or None; skips in a row."""

    last: int
    reason: str | None
    skips: int


def judge(
    rows: list[dict],
    grad_norms: np.ndarray,
    names: list[str],
    *,
    scaler: str,
    max_skips: int,
    skips: int = 0,
) -> Verdict:
    """Finds the step at which a run diverged.

    rows: one a step with `step` and `loss`; grad_norms: [steps, tensors]. A non-finite loss
    diverges. A non-finite gradient diverges without loss scaling; with it the step (dynamic) or the
    tensor (fixed) was skipped, and `max_skips` such steps in a row diverge. `skips`: those that the
    rows before ended with.
    """
    for i, row in enumerate(rows):
        if not np.isfinite(row["loss"]):
            reason = f"the loss is {row['loss']} at step {row['step']}"
            return Verdict(i + 1, reason, skips)
        bad = np.flatnonzero(~np.isfinite(grad_norms[i]))
        skips = skips + 1 if len(bad) else 0
        if len(bad) and (scaler == "none" or skips >= max_skips):
            some = ", ".join(names[j] for j in bad[:5]) + (", ..." if len(bad) > 5 else "")
            what = f"{len(bad)} gradients are not finite at step {row['step']} ({some})"
            reason = what if scaler == "none" else f"{skips} skips in a row: {what}"
            return Verdict(i + 1, reason, skips)
    return Verdict(len(rows), None, skips)
