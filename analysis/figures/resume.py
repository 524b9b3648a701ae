"""A run and the same run killed and restarted: their losses, and the difference.

Runs: `experiment=resume_mini` in two folders, one of them killed while it ran.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import style
from analysis.load import NoRunsError, Runs

KERNELS = {True: "deterministic=true", False: "deterministic=false"}
COLUMNS = ("run", "deterministic", "scale", "attempts", "num_steps", "step", "loss", "difference")
DISTURBED, UNDISTURBED = "#D55E00", "#000000"


def query(runs: Runs) -> pd.DataFrame:
    """One row per step of each run: attempts, loss, and the loss minus the undisturbed run's.

    Runs are compared within one value of `deterministic`; the undisturbed run has one attempt.
    `resumed` marks the first step of each later attempt. Raises NoRunsError without a pair.
    """
    attempts = runs.timing.groupby("run")["attempt"].max().rename("attempts") + 1
    heads = runs.runs.join(attempts, on="run", how="inner")
    frames = []
    for kernels, group in heads.groupby("deterministic"):
        whole = group[group["attempts"] == 1]
        if len(whole) != 1 or len(group) < 2:
            continue
        losses = {
            run: runs.metrics[runs.metrics["run"] == run].set_index("step")["loss"].astype(float)
            for run in group["run"]
        }
        for head in group.itertuples():
            loss = losses[head.run]
            frame = loss.rename("loss").reset_index()
            frame["difference"] = (loss - losses[whole["run"].iloc[0]]).reindex(loss.index).values
            frame["resumed"] = frame["step"].isin(_first_steps(runs.timing, head.run))
            facts = {"run": head.run, "deterministic": bool(kernels), "scale": head.scale}
            facts |= {"attempts": int(head.attempts), "num_steps": int(head.num_steps)}
            frames.append(frame.assign(**facts))
    if not frames:
        raise NoRunsError(
            "no pair to compare: a run of one attempt and the same run, in another run_dir, of "
            "several; see conf/experiment/resume_mini.yaml"
        )
    return pd.concat(frames, ignore_index=True)[[*COLUMNS, "resumed"]]


def _first_steps(timing: pd.DataFrame, run: str) -> list[int]:
    """The step after the checkpoint that each later attempt began from."""
    ends = timing[timing["run"] == run].groupby("attempt")["step"].max()
    return [int(end) + 1 for end in ends.iloc[:-1]]


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel: both losses, with a dotted line where the run was resumed."""
    for attempts, run in sorted(frame.groupby("attempts"), key=lambda item: -item[0]):
        disturbed = attempts > 1
        ax.plot(
            run["step"],
            run["loss"],
            color=DISTURBED if disturbed else UNDISTURBED,
            lw=2.4 if disturbed else 0.7,
            alpha=0.6 if disturbed else 1,
            label=f"killed {_times(attempts - 1)}" if disturbed else "undisturbed",
        )
        for step in run.loc[run["resumed"], "step"]:
            ax.axvline(step, color=DISTURBED, lw=0.7, ls=":")
    ax.set(title=KERNELS[bool(frame["deterministic"].iloc[0])], ylabel="training loss")
    ax.legend()
    return ax


def plot_difference(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel: the loss of the disturbed run minus that of the undisturbed one."""
    run = frame[frame["attempts"] > 1]
    ax.axhline(0, color=UNDISTURBED, lw=0.7)
    ax.plot(run["step"], run["difference"], color=DISTURBED, lw=0.8)
    if (run["difference"] == 0).all():
        ax.set_ylim(-1, 1)
        ax.text(0.5, 0.62, "every loss is the same", transform=ax.transAxes, ha="center",
                bbox={"color": "white", "pad": 1})  # fmt: skip
    for step in run.loc[run["resumed"], "step"]:
        ax.axvline(step, color=DISTURBED, lw=0.7, ls=":")
    ax.set(xlabel="step", ylabel="difference")
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a column for each value of `deterministic`: losses above, their difference below."""
    kinds = sorted(frame["deterministic"].unique(), reverse=True)
    figure.set_size_inches(style.COLUMN_WIDTH * len(kinds), 3.4)
    axes = figure.subplots(2, len(kinds), squeeze=False, sharex=True, height_ratios=(2, 1))
    for column, kind in enumerate(kinds):
        part = frame[frame["deterministic"] == kind]
        plot(part, axes[0, column])
        plot_difference(part, axes[1, column])


def caption(frame: pd.DataFrame) -> str:
    """States how often the run was killed, and how far its losses deviate."""
    parts = []
    for kind, part in frame[frame["attempts"] > 1].groupby("deterministic"):
        largest = np.nanmax(part["difference"].abs())
        text = f"losses differ by up to {largest:.3g}" if largest else "every loss is the same"
        parts.append(f"{KERNELS[bool(kind)]}: {text}")
    resumed = frame[frame["attempts"] > 1].groupby("run")["attempts"].first() - 1
    times = " and ".join(_times(count) for count in sorted(set(resumed)))
    return (
        f"Training loss of a run and of the same run killed {times} and started again "
        f"({frame['scale'].iloc[0]} scale, {frame['num_steps'].iloc[0]:,} steps; dotted: where it "
        f"resumed). {'; '.join(parts)}."
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
