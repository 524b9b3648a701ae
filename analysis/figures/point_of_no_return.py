"""How late a change still removes a loss spike, from the tables of `experiments.replay`.

Not in the paper. Runs: `experiment=point_of_no_return`, replayed from several steps `change_from`.
"""

import io
import re
import warnings

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import measures, naming, spike_marks, style
from analysis.comparison import counted
from analysis.load import Runs
from analysis.run_files import as_path
from lowprec.runs.read import read_file
from lowprec.runs.tables import UNREADABLE

CONTROL, UNCHANGED = "control", "unchanged"  # replays without a change
PERTURBED = "perturbed"  # replays from weights that differ in the last digit: the null arm
STAYS = 0.5  # share of the control's height from which on a spike counts as still there
TYPES = {  # of the table's columns that are needed
    **{"step": int, "change": str, "change_from": int, "perturbation": float, "lead": int},
    **{"height": float, "of_control": float, "gone": bool, "exact": bool},
}
COLUMNS = (*measures.OF_A_RUN, *TYPES, "height_of_control", "left_out")
SHORT = r"change_steps=(\d+) "  # how the name of a change for a few steps begins
APART = 0.96  # ratio of leads between changes, so that lines do not hide each other
REPLAY = ["step", "change", "change_from", "perturbation"]  # identifies a replay of a run
SPIKE = ["run", "step"]


def query(runs: Runs) -> pd.DataFrame:
    """Returns one row per replay whose change begins before the spike, of runs that have tables.

    Spikes up to `spike_marks.LARGE` nats high are left out: they are hardly higher than the scatter
    of the loss. The columns TYPES are those of `experiments.replay_report.table`. A replay that
    several tables of a run contain counts once. `left_out` is the number of batches up to the
    spike's own that a replay leaves out, if these begin after `change_from`, and else NaN.
    """
    return measures.by_run(runs, measures.named_heads(runs), COLUMNS, _replays)


def _replays(run: Runs, head: dict) -> pd.DataFrame:
    tables = [pd.DataFrame(columns=[*TYPES, "height_of_control"])]
    for path in sorted((as_path(head["path"]) / "replays").glob("*_table.csv"), key=str):
        try:
            table = pd.read_csv(io.BytesIO(read_file(path)))[list(TYPES)].astype(TYPES)
            height = table.loc[table["change"] == CONTROL, "height"].iloc[0]
        except (*UNREADABLE, IndexError) as error:
            warnings.warn(f"{path}: left out: {error}", stacklevel=2)
            continue
        if height <= spike_marks.LARGE:
            continue
        changed = ~table["change"].isin([CONTROL, UNCHANGED]) & (table["lead"] > 0)
        tables.append(table[changed].assign(height_of_control=height))
    frame = pd.concat(tables[1:] or tables).drop_duplicates(REPLAY)
    left_out = frame["change"].astype(str).str.extract(r"^skip_batches=(\d+)$")[0].astype(float)
    return frame.assign(left_out=left_out.where(left_out <= frame["lead"]))


def shares(frame: pd.DataFrame, by: str = "lead") -> pd.DataFrame:
    """By change and lead or `left_out`: the share of spikes that are gone, and their number.

    For perturbations, the share is the mean over spikes of the share of their replays.
    """
    gone = frame.groupby(["change", by, *SPIKE])["gone"].mean()
    return gone.groupby(["change", by]).agg(share="mean", num="size")


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draws the left panel: a line for each change, black and dashed for the perturbations.

    A change for a few steps is dashed, with open points, in the color of the lasting one.
    """
    table = shares(frame)
    lasting = {change: re.sub(SHORT, "", change) for change in frame["change"].unique()}
    changes = list(dict.fromkeys(lasting.values()))
    for change, of_change in lasting.items():
        line, number = table.loc[change], changes.index(of_change)
        label, look = change, {"color": f"C{number}"}
        if change == PERTURBED:
            label, look = "perturbed in the last digit", {"color": "black", "ls": (0, (3, 1.5))}
        elif change != of_change:
            num_steps = int(re.match(SHORT, change)[1])
            label = f"{of_change} for {counted(num_steps, 'step')}"
            look |= {"ls": (0, (3, 1.5)), "mfc": "white"}
        at = line.index * APART ** (number - (len(changes) - 1) / 2)
        ax.plot(at, 100 * line["share"], marker="o", ms=3, label=f"{label} ({_num(line)})", **look)
    _set_axes(ax, frame["lead"], "steps before the spike at which the change begins")
    return ax


def plot_left_out(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draws the right panel: the share by the number of batches that are left out."""
    line = shares(frame.assign(change=""), "left_out").loc[""]
    ax.plot(line.index, 100 * line["share"], marker="o", ms=3, color=style.OTHER)
    _set_axes(ax, frame["left_out"].astype(int), "batches left out,\nthe spike's own the last")
    ax.set_title(f"skip_batches ({_num(line)})")
    return ax


def _set_axes(ax: Axes, values: pd.Series, label: str) -> None:
    values = sorted(values.unique())
    ax.set_xscale("log", base=2)
    ax.set_xticks(values, list(map(str, values)), minor=False)
    ax.invert_xaxis()
    ax.set(xlabel=label, ylabel="spikes that are gone (%)", ylim=(-4, 104))


def _num(line: pd.DataFrame) -> str:
    """`6`, or `5-6`: the numbers of spikes of a line's points."""
    return "-".join(map(str, sorted({line["num"].min(), line["num"].max()})))


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws the changes above their legend, and left-out batches beside them if there are any."""
    is_left_out = frame["left_out"].notna()
    parts = [(plot, frame[~is_left_out], 3.2), (plot_left_out, frame[is_left_out], 1)]
    parts = [part for part in parts if len(part[1])]
    plots, frames, widths = zip(*parts, strict=True)
    figure.set_size_inches(0.44 * sum(widths) * style.COLUMN_WIDTH, 3.6)
    axes = figure.subplots(1, len(parts), sharey=True, width_ratios=widths, squeeze=False)[0]
    for draw_panel, of_panel, ax in zip(plots, frames, axes, strict=True):
        draw_panel(of_panel, ax).label_outer()
    entries, title = axes[0].get_legend_handles_labels(), "change (number of spikes)"
    if entries[0]:
        figure.set_figheight(2.8 + 0.17 * -(-len(entries[0]) // len(parts)))
        figure.legend(*entries, loc="outside lower left", title=title, ncols=len(parts))


def caption(frame: pd.DataFrame) -> str:
    """Describes runs, spikes and replays, and when a spike counts as gone."""
    runs, spikes = frame.drop_duplicates("run"), frame.drop_duplicates(SPIKE)
    starts = frame.drop_duplicates([*SPIKE, "change_from"])
    heights = spikes["height_of_control"]
    text = (
        f"Loss spikes that a change removes, by the step at which it begins, in "
        f"{measures.of_runs(runs)} ({measures.methods(runs)}): {counted(len(spikes), 'spike')}, "
        f"{heights.min():.2g} to {heights.max():.2g} nats high. A spike is gone if it is lower "
        f"than {STAYS:.0%} of its height in an unchanged replay. From {starts['exact'].sum()} of "
        f"{len(starts)} steps, unchanged replays have exactly the recorded losses."
    )
    perturbed = frame[frame["change"] == PERTURBED]
    if len(perturbed):
        num = naming.join(sorted(perturbed.groupby([*SPIKE, "change_from"]).size().unique()))
        text += (
            f" Black: {num} replays of each spike and step that change nothing but the last digit "
            "of the weights, and in which a spike is gone by chance."
        )
    if frame["change"].str.match(SHORT).any():
        text += " Dashed, with open points: the change ends after the given number of steps."
    if frame["left_out"].notna().any():
        text += " Right: the last batches up to the spike's own are left out for the next ones."
    return text + measures.caption_end(runs, crosses=False)
