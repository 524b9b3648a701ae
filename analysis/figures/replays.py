"""How late a change still removes a loss spike, from the tables of `experiments.replay`.

Not in the paper. Runs: `experiment=point_of_no_return`, replayed from several steps `change_from`.
"""

import io
import re
import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis import measures, naming, spike_marks
from analysis.comparison import counted
from analysis.grammar import Panels
from analysis.load import Runs
from analysis.run_files import as_path
from lowprec.runs.read import read_file
from lowprec.runs.tables import UNREADABLE

CONTROL, UNCHANGED = "control", "unchanged"  # replays without a change
LEFT_OUT = "batches left out"  # of `shares`: changes that only leave out some batches
PERTURBED = "perturbed"  # replays from weights that differ in the last digit: the null arm
STAYS = 0.5  # share of the control's height from which on a spike counts as still there
TYPES = {  # of the table's columns that are needed
    **{"step": int, "change": str, "change_from": int, "perturbation": float, "lead": int},
    **{"height": float, "of_control": float, "gone": bool, "exact": bool},
}
COLUMNS = (*measures.OF_A_RUN, *TYPES, "height_of_control", "left_out")
SHORT = r"change_steps=(\d+) "  # how the name of a change for a few steps begins
REPLAY = ["step", "change", "change_from", "perturbation"]  # identifies a replay of a run
SPIKE = ["run", "step"]


def replays(runs: Runs) -> pd.DataFrame:
    """Returns one row per replay whose change begins before the spike, of runs that have tables.

    Spikes up to `spike_marks.LARGE` nats high are left out: they are hardly higher than the scatter
    of the loss. The columns TYPES are those of `experiments.replay_report.table`. A replay that
    several tables of a run contain counts once. `left_out` is the number of batches up to the
    spike's own that a replay leaves out, if these begin after `change_from`, and else NaN.
    """
    return measures.by_run(runs, measures.named_heads(runs), COLUMNS, _replays)


def read_replays(
    head: dict, parse: Callable[[pd.DataFrame], pd.DataFrame], is_table: bool
) -> pd.DataFrame:
    """The rows of `parse(file)` for each file of replayed steps of a run, or each table of replays.

    Damaged files are left out with a warning.
    """
    folder, parts = as_path(head["path"]) / "replays", [pd.DataFrame()]
    for path in sorted(folder.glob("step_*.csv"), key=str):
        try:
            if path.name.endswith("_table.csv") == is_table:
                parts.append(parse(pd.read_csv(io.BytesIO(read_file(path)))))
        except UNREADABLE as error:
            warnings.warn(f"{path}: left out: {error}", stacklevel=2)
    return pd.concat(parts[1:] or parts)


def _changed(table: pd.DataFrame) -> pd.DataFrame:
    """The replays with a change before the spike, if it is large."""
    table = table[list(TYPES)].astype(TYPES)
    height = table.loc[table["change"] == CONTROL, "height"].iloc[0]
    changed = ~table["change"].isin([CONTROL, UNCHANGED]) & (table["lead"] > 0)
    return table[changed & ~(height <= spike_marks.LARGE)].assign(height_of_control=height)


def _replays(run: Runs, head: dict) -> pd.DataFrame:
    frame = read_replays(head, _changed, is_table=True)
    if frame.empty:
        return frame
    frame = frame.drop_duplicates(REPLAY)
    left_out = frame["change"].astype(str).str.extract(r"^skip_batches=(\d+)$")[0].astype(float)
    return frame.assign(left_out=left_out.where(left_out <= frame["lead"]))


def shares(frame: pd.DataFrame) -> pd.DataFrame:
    """By change and lead: the share of spikes that are gone, and their number.

    For perturbations, the share is the mean over spikes of the share of their replays. Changes that
    only leave out some batches are one change, LEFT_OUT, whose lead is that of the first of them.
    """
    is_left_out = frame["left_out"].notna()
    change = frame["change"].mask(is_left_out, LEFT_OUT)
    lead = frame["lead"].astype(int).mask(is_left_out, frame["left_out"].fillna(0).astype(int))
    gone = frame.assign(change=change, lead=lead).groupby(["change", "lead", *SPIKE])["gone"].mean()
    return gone.groupby(["change", "lead"]).agg(share="mean", num="size")


def in_words(change: str, lr: float) -> str:
    """A change in print: `beta2 0.9, for 1 step` for `change_steps=1 optimizer.beta2=0.9`.

    A learning rate is named by its ratio to `lr`, that of the run.
    """
    key, _, value = re.sub(SHORT, "", change).partition("=")
    tensors = value.strip("[]").replace(spike_marks.TENSOR, "the patch embedding")
    words = {
        PERTURBED: "no change but in the weights' last digits",
        LEFT_OUT: "batches up to the onset left out",
        "skip_batches": "other batches",
        "optimizer": naming.optimizer_name(value),
        "optimizer.lr": key == "optimizer.lr" and _times(float(value) / lr),
        "clip_tensors": f"updates of {tensors} clipped",
    }.get(key, f"{key.removeprefix('optimizer.')} {value}")
    short = re.match(SHORT, change)
    return words + (f", for {counted(int(short[1]), 'step')}" if short else "")


def _times(ratio: float) -> str:
    return f"{'half' if ratio == 0.5 else f'{ratio:g} times'} the learning rate"


def plot(frame: pd.DataFrame, ax: Axes) -> None:
    """A row for each change, lasting and strong ones first, and a column for each lead.

    A cell has the number of spikes that are gone, or for perturbations the share of replays.
    """
    table = shares(frame)
    share = table["share"].unstack().sort_index(axis=1, ascending=False)
    kinds = [bool(re.match(SHORT, name)) + 2 * (name == PERTURBED) for name in share.index]
    share = share.iloc[np.lexsort([-share.mean(axis=1), kinds])]
    ax.pcolormesh(share, cmap="Blues", vmin=0, vmax=1.25, edgecolors="white", lw=1)
    middle = {"ha": "center", "va": "center"}
    for (row, column), value in np.ndenumerate(share):
        if np.isnan(value):
            ax.text(column + 0.5, row + 0.5, "not tried", **middle, fontsize=6, color="0.6")
            continue
        num = table["num"][share.index[row], share.columns[column]]
        is_share = share.index[row] == PERTURBED
        text = f"{value:.0%}" if is_share else f"{value * num:.0f} of {num}"
        color = "white" if value > 0.6 else "black"
        ax.text(column + 0.5, row + 0.5, text, **middle, fontsize=7, color=color)
    names = [in_words(change, frame["lr"].iloc[0]) for change in share.index]
    ax.set_yticks(np.arange(len(share)) + 0.5, names)
    ax.set_xticks(np.arange(share.shape[1]) + 0.5, [f"{lead}" for lead in share.columns])
    ax.tick_params(length=0)
    ax.grid(visible=False)
    ax.invert_yaxis()
    ax.set_xlabel("change begins: steps before the onset")


def still_removed(frame: pd.DataFrame) -> str:
    """The title of `point_of_no_return`: the lasting changes that remove all spikes at the end.

    Those that were tried on one spike alone do not count.
    """
    table = shares(frame).reset_index("change")
    last = table.index.min()
    at_end = table.loc[[last]]
    removing = at_end.loc[(at_end["share"] == 1) & (at_end["num"] > 1), "change"]
    names = [name for name in removing if not re.match(SHORT, name)]
    names = naming.join(in_words(name, frame["lr"].iloc[0]) for name in names)
    when = f"Even {counted(last, 'step')} before the onset"
    return f"{when}, all loss spikes are removed by {names}" if names else ""


FIGURES = {
    "point_of_no_return": Panels(
        studies=("point_of_no_return",),
        table=replays,
        plots=(plot,),
        title=still_removed,
        size=lambda frame: (1.7, 1 + 0.24 * len(shares(frame).index.unique("change"))),
        what="loss spikes that a change removes, by the step at which it begins,",
        text=f"A spike is gone if it is lower than {STAYS:.0%} of its height in an unchanged "
        "replay. Last row, if there is one: the share of replays that change nothing but the last "
        "digit of the weights, in which a spike is gone by chance. Batches left out: those from "
        "the given step up to the spike's own, in place of which training goes on with the next.",
    )
}
