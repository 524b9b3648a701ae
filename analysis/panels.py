"""What figures draw with: panels, axes, names, legends, and the line of chance."""

import itertools
import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import OffsetFrom
from matplotlib.ticker import EngFormatter, FixedLocator
from matplotlib.transforms import Bbox
from scipy.optimize import isotonic_regression

from analysis import naming, style

MANY = 8  # ticks of an axis of numbers
LONGEST, MOST_LINES = 25, 11  # of names beside a panel: characters of a line, and lines
SIDES = {
    (1, 0): ("left", "center"),
    (-1, 0): ("right", "center"),
    (0, 1): ("center", "bottom"),
    (0, -1): ("center", "top"),
}  # of a name beside a point
HIGHEST = 1.1  # of a panel: the middle of the highest of these names
LINE = 0.115  # inches, the height of a line of these names
GAP = 0.03  # inches: labels of an axis that are closer are turned
TITLE_CHARACTERS, LINE_OF_TITLE = 14, 0.16  # for each inch of a figure's title; inches
MARK_COLOR, CHARACTERS_OF_MARK = "#A61C00", 15  # of a mark; for each inch
CHARACTERS, HANDLE = 19, 9  # of a legend, for each inch; as wide as a handle with its space
CAP_AFTER = 0.1  # the loss axis ends at the largest loss after this share of the run,
SHORT = 400  # or of a run with fewer steps at the largest loss
IN_PRINT = f"after the first tenth (with fewer than {SHORT} steps, at any step)"
MOST = 2  # but at most at this multiple of the first loss
NARROW = 1.1  # ratio of the largest to the smallest value up to which no axis is logarithmic
WIDE = 10  # ratio of the largest to the smallest value beyond which an axis is logarithmic


def grid(figure: Figure, num: int, height: float = 2.5, most: int | None = None) -> list[Axes]:
    """`num` axes, each `height` inches high; sizes the figure, one or two columns of text wide.

    Without `most`, the number in a row is two, or three if that leaves no gap.
    """
    columns = min(most or (3 if num % 2 and num % 3 == 0 else 2), num)
    rows = -(-num // columns)
    figure.set_size_inches(style.COLUMN_WIDTH * min(2, columns), height * rows)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes[num:]:
        ax.remove()
    return axes[:num]


def add_title(canvas: Figure, title: str, mark: str) -> None:
    """Writes the title of a figure above its panels, and over it in red what marks the figure."""
    width, height = canvas.get_figwidth(), canvas.get_figheight()
    title = textwrap.fill(title, int(TITLE_CHARACTERS * width), break_on_hyphens=False)
    mark = textwrap.fill(mark and f"Marked: {mark}", int(CHARACTERS_OF_MARK * width))
    of_title = bool(title) * LINE_OF_TITLE * (1 + title.count("\n"))
    of_mark = bool(mark) * LINE * (2 + mark.count("\n"))
    height += of_title + of_mark
    canvas.set_figheight(height)
    place = {}
    if mark:  # the layout would move the panels below it, but not the title
        canvas.text(0.01, 1, mark, va="top", fontsize=6.5, color=MARK_COLOR)
        canvas.get_layout_engine().set(rect=(0, 0, 1, 1 - (of_mark + of_title) / height))
        place = {"y": 1 - of_mark / height, "va": "top"}
    if title:
        canvas.suptitle(title, x=0.01, ha="left", fontsize=8.5, fontweight="bold", **place)


def share_limits(axes: list[Axes]) -> None:
    """Sets the y axes of panels that are compared to one range, which covers all of theirs."""
    limits = [ax.get_ylim() for ax in axes]
    for ax in axes:
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))


def draw_chance(ax: Axes, batch_sizes: pd.Series) -> None:
    """A dotted line at chance, the loss ln(batch size), where the range of the axis includes it."""
    ylim = ax.get_ylim()
    for size in sorted(set(batch_sizes[batch_sizes > 0])):
        ax.hlines(np.log(size), 0, 1, transform=ax.get_yaxis_transform(), color=style.OTHER, lw=0.7,
                  linestyles="dotted", zorder=1)  # fmt: skip
        is_at_top = 0.95 < (np.log(size) - ylim[0]) / (ylim[1] - ylim[0]) <= 1
        ax.annotate(f"chance, ln {size:,}", (0.99, np.log(size)), (0, -7 if is_at_top else 1.5),
                    fontsize=6.5,
                    xycoords=ax.get_yaxis_transform(), textcoords="offset points", ha="right",
                    color=style.OTHER, annotation_clip=True)  # fmt: skip
    ax.set_ylim(ylim)


def step_axis(ax: Axes) -> None:
    """A step axis with few ticks: `10k`."""
    ax.set_xlabel("step")
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.locator_params(axis="x", nbins=5)


def cap(frame: pd.DataFrame) -> float:
    """Upper end of the loss axis: the largest loss after `CAP_AFTER` of a run, if it is not SHORT.

    It is at most `MOST` times the first loss. Diverged runs count only if all diverged.
    """
    first = frame.loc[frame["step"] == 1, "loss"].max()
    late = _is_late(frame)
    counted = late & (frame["state"] != "diverged")
    for losses in (frame["loss"][counted], frame["loss"][late], frame["loss"]):
        finite = losses[np.isfinite(losses)]
        if len(finite):
            return 1.05 * float(np.fmin(finite.max(), MOST * first))
    return 1.0


def _is_late(frame: pd.DataFrame) -> pd.Series:
    num_steps = frame["num_steps"]
    return (frame["step"] >= CAP_AFTER * num_steps) | (num_steps < SHORT)


def turn_names(canvas: Figure, axes: list[Axes]) -> None:
    """Turns the labels of x axes where some would touch each other."""
    canvas.draw_without_rendering()  # sets the widths of panels
    for ax in axes:
        boxes = [text.get_window_extent() for text in ax.get_xticklabels()]
        gaps = [after.x0 - box.x1 for box, after in itertools.pairwise(boxes)]
        if min(gaps, default=np.inf) < GAP * canvas.dpi:
            ax.tick_params(axis="x", labelrotation=45)
            for text in ax.get_xticklabels():
                text.set(ha="right", rotation_mode="anchor")


def number_axis(ax: Axes, values: pd.Series) -> None:
    """A logarithmic x axis with a tick at each of a few values."""
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter("{x:,g}")
    if values.nunique() <= MANY:
        ticks = sorted(values.unique())
        ax.set_xticks(ticks, [naming.number(tick) for tick in ticks], rotation=45, ha="right")
        ax.minorticks_off()


def wrap_titles(canvas: Figure) -> None:
    """Breaks the titles of panels where some would touch each other or the edge."""
    titled = [ax for ax in canvas.axes if ax.get_title()]
    if not titled:
        return
    canvas.draw_without_rendering()  # sets the widths of panels
    boxes = [ax.title.get_window_extent() for ax in titled]
    touching = any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    if not touching and all(box.x0 >= 0 and box.x1 <= canvas.bbox.x1 for box in boxes):
        return
    for ax, box in zip(titled, boxes, strict=True):
        lines = ax.get_title().split("\n")
        width = int(max(map(len, lines)) * min(1, ax.bbox.width / box.width))
        broken = [textwrap.fill(line, width, break_on_hyphens=False) for line in lines]
        ax.set_title("\n".join(broken))


def name_lines(canvas: Figure, axes: list[Axes]) -> None:
    """Names lines at their right ends, in their colors, or else in a legend below.

    There is a legend if three panels in a row share a name, if names are many or long, and if
    anything has a name but lines that end at the right. What the title of a panel says is left out.
    """
    named, texts = [], []  # by panel: by label its lines, and the lines of its text
    for ax in axes:
        named.append({})
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            named[-1].setdefault(label, []).append(handle)
        texts.append({label: _without(label, ax.get_title()) for label in named[-1]})
    labels = [label for of_panel in named for label in of_panel]
    of_text = [line for of_panel in texts for text in of_panel.values() for line in text]
    if (
        (len({*labels}) < len(labels) and axes[0].get_gridspec().ncols > 2)
        or max(map(len, of_text), default=0) > LONGEST
        or any(sum(map(len, of_panel.values())) > MOST_LINES for of_panel in texts)
        or not all(
            isinstance(handle, Line2D) and handle.get_ls() != "None" and _end(ax, handle)[0] > 0.7
            for ax, of_panel in zip(axes, named, strict=True)
            for handle in itertools.chain(*of_panel.values())
        )
    ):
        legend_below(canvas, axes)
        return
    canvas.draw_without_rendering()  # sets the heights of panels
    for ax, of_panel, text in zip(axes, named, texts, strict=True):
        line_height = LINE / (ax.get_position().height * canvas.get_figheight())
        ends = [
            (*end, text[label], lines[0].get_color())
            for label, lines in of_panel.items()
            for end in _apart([_end(ax, line) for line in lines], line_height)
        ]
        _name_ends(ax, ends, line_height)


def name_points(canvas: Figure, ax: Axes) -> None:
    """Names groups of points beside one of their points, in their colors, or in a legend below.

    There is a legend if a name fits nowhere without touching a point or another name.
    """
    canvas.draw_without_rendering()  # sets the places of points
    lines, names = [line for line in ax.lines if len(line.get_xdata())], []
    places = [ax.transData.transform(line.get_xydata()) for line in lines]
    radius = 0.7 * max(line.get_markersize() for line in lines) * canvas.dpi / 72
    boxes = [Bbox([at - radius, at + radius]) for at in np.concatenate(places)]
    for line, at in zip(lines, places, strict=True):
        points = line.get_xydata()[np.argsort(at[:, 1])]
        for point, (side, (ha, va)) in itertools.product(points, SIDES.items()):
            name = ax.annotate(line.get_label(), point, 5 * np.array(side), ha=ha, va=va,
                               textcoords="offset points", fontsize=7, color=line.get_color(),
                               gid="name")  # fmt: skip
            box = name.get_window_extent()
            if box.count_overlaps(boxes) == 0 and ax.bbox.count_contains(box.corners()) == 4:
                boxes.append(box)
                names.append(name)
                break
            name.remove()
        else:
            for name in names:
                name.remove()
            legend_below(canvas, [ax])
            return


def _without(label: str, title: str) -> list[str]:
    """The lines of a label without the parts that a title has."""
    parts, known = label.split(", "), title.replace("\n", ", ").split(", ")
    own = [part for part in parts if part not in known] or parts
    return textwrap.wrap(", ".join(own), LONGEST, break_on_hyphens=False)


def _end(ax: Axes, line: Line2D) -> tuple[float, float]:
    """Where a line ends, in shares of the panel; (0, 0) if it has no two points."""
    points = np.column_stack([line.get_xdata(), line.get_ydata()]).astype(float)
    points = points[np.isfinite(points).all(axis=1)]
    if len(points) < 2:
        return 0.0, 0.0
    x, y = ax.transLimits.transform(ax.transScale.transform(points[-1]))
    return x, float(np.clip(np.nan_to_num(y), 0.0, 1.0))


def _apart(ends: list[tuple[float, float]], line_height: float) -> list[tuple[float, float]]:
    """Of the ends of lines that share a name, the middle one of each bundle."""
    ends = sorted(ends, key=lambda end: end[1])
    is_new = np.diff([y for _, y in ends], prepend=-np.inf) > line_height
    bundles = [[*of_bundle] for of_bundle in np.split(np.array(ends), np.flatnonzero(is_new)[1:])]
    return [tuple(bundle[(len(bundle) - 1) // 2]) for bundle in bundles]


def _name_ends(
    ax: Axes, ends: list[tuple[float, float, list[str], tuple]], line_height: float
) -> None:
    """Writes names beside a panel, as close to given points as they fit, and joins them to these.

    The points are in shares of the panel.
    """
    ends = sorted(ends, key=lambda end: end[1])
    sizes = np.array([line_height * len(text) for *_, text, _ in ends])
    below = np.cumsum(sizes) - sizes / 2  # the middles of names without gaps
    starts = isotonic_regression([y for _, y, *_ in ends] - below).x
    heights = np.clip(starts, None, HIGHEST - below[-1:].sum()) + below
    for height, (*end, text, color) in zip(heights, ends, strict=True):
        beside = OffsetFrom(ax.transAxes, (1, height))
        join = {"arrowstyle": "-", "color": color, "lw": 0.6, "shrinkA": 1, "shrinkB": 1}
        ax.annotate("\n".join(text), end, (9, 0), xycoords="axes fraction", textcoords=beside,
                    fontsize=7, color=color, va="center", gid="name",
                    arrowprops=join | {"relpos": (0, 0.5)})  # fmt: skip


def legend_below(canvas: Figure, axes: list[Axes]) -> None:
    """One legend under the panels, which makes the figure higher; shared names appear once."""
    named = {}
    of_panels = [ax.get_legend_handles_labels() for ax in axes]
    for handles, labels in sorted(
        of_panels, key=lambda both: -len(both[1])
    ):  # most names: in order
        named |= dict(zip(labels, handles, strict=True))
    named = {label: handle for label, handle in named.items() if handle}
    if not named:
        return
    ncols = _num_legend_columns([*named], CHARACTERS * canvas.get_figwidth())
    ncols = -(-len(named) // -(-len(named) // ncols))  # rows are equally long
    canvas.set_figheight(canvas.get_figheight() + 0.1 + 0.17 * -(-len(named) // ncols))
    look = {"handlelength": 2.2, "columnspacing": 1.5}
    canvas.legend(named.values(), named, loc="outside lower center", ncols=ncols, **look)


def _num_legend_columns(labels: list[str], width: float) -> int:
    """The most columns, filled from left to right, that are together at most `width` wide."""
    for num in range(len(labels), 1, -1):
        columns = np.array_split(np.array([len(label) + HANDLE for label in labels]), num)
        if sum(column.max() for column in columns) <= width:
            return num
    return 1


def label_outer(axes: list[Axes]) -> None:
    """Removes the label of an axis where the panel to the left, or below, has the same one.

    The names of rows that the panel to the left has go, too.
    """
    at = {(*ax.get_subplotspec().rowspan, *ax.get_subplotspec().colspan): ax for ax in axes}
    for (row, column), ax in sorted(at.items(), key=lambda item: (item[0][0], -item[0][1])):
        left, below = at.get((row, column - 1)), at.get((row + 1, column))
        if left and left.get_ylabel() == ax.get_ylabel():
            ax.set_ylabel("")
        if left and _names(left) == _names(ax) != []:
            ax.tick_params(labelleft=False)
        if below and below.get_xlabel() == ax.get_xlabel():
            ax.set_xlabel("")


def _names(ax: Axes) -> list[str]:
    """The names of rows."""
    is_fixed = isinstance(ax.yaxis.get_major_locator(), FixedLocator)
    return [text.get_text() for text in ax.get_yticklabels()] if is_fixed else []


def is_log(values: pd.Series, log: bool | None) -> bool:
    """Whether an axis is logarithmic, if its values differ by more than NARROW, or None: WIDE."""
    low, high = values[np.isfinite(values)].agg(["min", "max"])
    return bool(0 < low < np.inf and high > (NARROW if log else WIDE) * low and log is not False)


def value_axis(ax: Axes, log: bool, name: str = "y") -> None:
    """An axis of values with some room at its ends."""
    if log:
        style.log_axis(ax, name)
    else:
        ax.margins(**{name: 0.1})
        ax.ticklabel_format(axis=name, useOffset=False)
        if name == "x":
            ax.locator_params(axis="x", nbins=6, steps=[1, 2, 5, 10])


def name_values(ax: Axes, label: str, name: str) -> None:
    """Labels an axis of values; one that is logarithmic or does not begin at 0 says so."""
    low, _ = getattr(ax, f"get_{name}lim")()
    is_log = getattr(ax, f"get_{name}scale")() == "log"
    if low > 0:
        begin, is_unit, unit = label.partition(" (")
        kind = "log scale" if is_log else "axis not from 0"
        label = f"{begin} ({unit.removesuffix(')')}{', ' if is_unit else ''}{kind})"
    getattr(ax, f"set_{name}label")(label)


def loss_axis(ax: Axes, frame: pd.DataFrame) -> None:
    """A y axis up to `cap`, from 0, or from the smallest loss if that is in its upper half."""
    finite = frame.loc[np.isfinite(frame["loss"]), "loss"]
    top, lowest = cap(frame), finite.min() if len(finite) else 0.0
    ax.set_ylim(max(0, lowest - 0.03 * (top - lowest)) if lowest > top / 2 else 0, top)
    ax.locator_params(axis="y", nbins=6)


def mark_end(ax: Axes, steps: pd.Series, values: pd.Series, color: tuple) -> None:
    """A cross where a diverged run ends, at the edge of the panel if that is beyond it."""
    at = np.isfinite(values)
    if at.any():
        step, value = steps[at].iloc[-1], min(values[at].iloc[-1], ax.get_ylim()[1])
        look = {"marker": "X", "ms": 5.5, "mec": "white", "mew": 0.6}
        ax.plot([step], [value], color=color, zorder=4, clip_on=False, **look)


def above(frame: pd.DataFrame, top: float) -> pd.DataFrame:
    """The rows that `cap` counts, of runs that did not diverge, whose loss is beyond the axis."""
    return frame[_is_late(frame) & (frame["state"] != "diverged") & (frame["loss"] > top)]


def mark_above(ax: Axes, run: pd.DataFrame, color: tuple) -> None:
    """Triangles at the upper edge where the loss of a run is `above`."""
    steps, top = above(run, ax.get_ylim()[1])["step"], ax.get_ylim()[1]
    look = {"marker": "^", "ms": 4, "ls": "none", "zorder": 4, "clip_on": False}
    if len(steps):
        ax.plot(steps, np.full(len(steps), top), color=color, **look)
