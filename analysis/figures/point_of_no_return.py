"""How late a change still removes a loss spike, from the tables of `experiments.replay`.

Not in the paper. Runs: `experiment=point_of_no_return`, replayed from several steps `change_from`.
"""

import io
import warnings

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import curves, style
from analysis.comparison import counted
from analysis.load import Runs
from analysis.run_files import UNREADABLE, as_path
from lowprec.runs.read import read_file

CONTROL, UNCHANGED = "control", "unchanged"  # replays without a change
PERTURBED = "perturbed"  # replays from weights that differ in the last digit: the null arm
STAYS = 0.5  # share of the control's height from which on a spike counts as still there
TYPES = {  # of the table's columns that are needed
    **{"step": int, "change": str, "change_from": int, "perturbation": float, "lead": int},
    **{"height": float, "of_control": float, "gone": bool, "exact": bool},
}
COLUMNS = (*curves.OF_A_RUN, *TYPES, "height_of_control")
APART = 0.96  # ratio of leads between changes, so that lines do not hide each other
REPLAY = ["step", "change", "change_from", "perturbation"]  # identifies a replay of a run
SPIKE = ["run", "step"]


def query(runs: Runs) -> pd.DataFrame:
    """Returns one row per replay whose change begins before the spike, of runs that have tables.

    The columns TYPES are those of `experiments.replay_report.table`. A replay that several tables
    of a run contain counts once.
    """
    return curves.by_run(runs, curves.named_heads(runs), COLUMNS, _replays)


def _replays(run: Runs, head: dict) -> pd.DataFrame:
    tables = [pd.DataFrame(columns=[*TYPES, "height_of_control"])]
    for path in sorted((as_path(head["path"]) / "replays").glob("*_table.csv"), key=str):
        try:
            table = pd.read_csv(io.BytesIO(read_file(path)))[list(TYPES)].astype(TYPES)
            height = table.loc[table["change"] == CONTROL, "height"].iloc[0]
        except (*UNREADABLE, IndexError) as error:
            warnings.warn(f"{path}: left out: {error}", stacklevel=2)
            continue
        changed = ~table["change"].isin([CONTROL, UNCHANGED]) & (table["lead"] > 0)
        tables.append(table[changed].assign(height_of_control=height))
    return pd.concat(tables[1:] or tables).drop_duplicates(REPLAY)


def shares(frame: pd.DataFrame) -> pd.DataFrame:
    """By change and lead: the share of spikes that are gone, and their number.

    For perturbations, the share is the mean over spikes of the share of their replays.
    """
    gone = frame.groupby(["change", "lead", *SPIKE])["gone"].mean()
    return gone.groupby(["change", "lead"]).agg(share="mean", num="size")


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draws the single panel: a line for each change, dashed for the perturbations."""
    table, changes = shares(frame), frame["change"].unique()
    for number, change in enumerate(changes):
        line = table.loc[change]
        label, look = change, {"color": f"C{number}"}
        if change == PERTURBED:
            label, look = "perturbed in the last digit", {"color": "black", "ls": (0, (3, 1.5))}
        num = "-".join(map(str, sorted({line["num"].min(), line["num"].max()})))
        at = line.index * APART ** (number - (len(changes) - 1) / 2)
        ax.plot(at, 100 * line["share"], marker="o", ms=3, label=f"{label} ({num})", **look)
    leads = sorted(frame["lead"].unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(leads, [str(lead) for lead in leads], minor=False)
    ax.invert_xaxis()
    ax.set(xlabel="steps before the spike at which the change begins")
    ax.set(ylabel="spikes that are gone (%)", ylim=(-4, 104))
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws the panel above its legend."""
    num = frame["change"].nunique()
    figure.set_size_inches(1.4 * style.COLUMN_WIDTH, 2.6 + 0.17 * num)
    ax = plot(frame, figure.add_subplot())
    entries, title = ax.get_legend_handles_labels(), "change (number of spikes)"
    figure.legend(*entries, loc="outside lower left", title=title)


def caption(frame: pd.DataFrame) -> str:
    """Describes runs, spikes and replays, and when a spike counts as gone."""
    runs, spikes = frame.drop_duplicates("run"), frame.drop_duplicates(SPIKE)
    starts = frame.drop_duplicates([*SPIKE, "change_from"])
    heights = spikes["height_of_control"]
    text = (
        f"Loss spikes that a change removes, by the step at which it begins, in "
        f"{curves.of_runs(runs)} ({curves.methods(runs)}): {counted(len(spikes), 'spike')}, "
        f"{heights.min():.2g} to {heights.max():.2g} nats high. A spike is gone if it is lower "
        f"than {STAYS:.0%} of its height in an unchanged replay. From {starts['exact'].sum()} of "
        f"{len(starts)} steps, unchanged replays have exactly the recorded losses."
    )
    perturbed = frame[frame["change"] == PERTURBED]
    if len(perturbed):
        num = curves.join(sorted(perturbed.groupby([*SPIKE, "change_from"]).size().unique()))
        text += (
            f" Dashed: {num} replays of each spike and step that change nothing but the last digit "
            "of the weights, and in which a spike is gone by chance."
        )
    return text + curves.caption_end(runs, crosses=False)
