"""`Points` and `Rows`, rows of the tables of `analysis/figures`: a point for each run."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from analysis import marks, naming, panels, style
from analysis.grammar import Axis, Facet, Figure, in_one_panel
from analysis.load import NoRunsError

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SIDE, SLOTS = 0.1, 0.7  # of the distance of two named values: by which points that would hide
# each other move aside, and that the hues share
SHADE = "#F4E3E0"
HEIGHT, REST = 0.2, 0.6  # inches: of a row, and of all that is below


@dataclass(eq=False, kw_only=True)
class OfRuns(Figure):
    """A point for each run, in the color of its hue.

    Attributes:
        values: each of these axes has a panel if a run has its value; a run without it has a cross.
        hue: the column whose values have colors; those in `order` come first.
        look: the color and the line style of a hue, by its first row.
        name: the name of a hue, by its first row. What all methods share is left out.
        hollow: marks the runs that have open points in rows, and what they are.
        facet: divides the frame into panels, with titles.
    """

    values: tuple[Axis, ...]
    hue: str = "method"
    order: tuple = ()
    look: Callable[[pd.Series], tuple] = style.look_of_recipe
    name: Callable[[pd.Series], str] | None = None
    hollow: tuple[Callable[[pd.DataFrame], pd.Series], str] | None = None
    facet: Facet = in_one_panel

    def words(self, frame: pd.DataFrame) -> str:
        """`what`, if all axes are drawn, or else these."""
        drawn = self._drawn(frame)
        if self.what and len(drawn) == len(self.values):
            return self.what
        return naming.join(axis.quantity(frame) for axis in drawn)

    def _drawn(self, frame: pd.DataFrame) -> list[Axis]:
        """The axes of which a run has a value, or else the first one."""
        return [v for v in self.values if frame[v.column].notna().any()] or [self.values[0]]

    def _sorted(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The frame by hue; methods by precision."""
        ranks = {hue: i for i, hue in enumerate(self.order)}  # of others: NaN, which is last
        frame = frame.sort_values(self.hue, key=lambda hues: hues.map(ranks), kind="stable")
        if self.hue != "method":
            return frame
        ranks = frame["precision"].map(naming.order("precision.label"))
        return frame.loc[ranks.sort_values(kind="stable").index]

    @staticmethod
    def _lacks(frame: pd.DataFrame, axis: Axis) -> bool:
        """Whether no run that an axis shows has its value or diverged."""
        frame = axis.where(frame)
        return frame[axis.column].isna().all() and (frame["state"] != "diverged").all()

    def _labels(self, frame: pd.DataFrame) -> dict[str, str]:
        heads = frame.drop_duplicates(self.hue).set_index(self.hue, drop=False)
        names = {hue: self.name(head) if self.name else str(hue) for hue, head in heads.iterrows()}
        precisions, optimizers = (
            frame[key].dropna().unique() for key in ("precision", "optimizer")
        )
        shared = naming.method("", optimizers[0])
        if len(optimizers) > 1:
            shared = f"{naming.precision(precisions[0])}, " if len(precisions) == 1 else ", , "
        return {hue: name.replace(shared, "") for hue, name in names.items()}


@dataclass(eq=False, kw_only=True)
class Points(OfRuns):
    """A point for each run, by its values on two axes; with one named value of x, in rows.

    Attributes:
        x: the horizontal axis, whose value drawn runs have; `values` are vertical.
        means: whether a line joins the means of the runs at one place.
        shade: the value of x from which on panels are faded, with the reason, or None.
    """

    x: Axis
    means: bool = True
    shade: Callable[[pd.DataFrame], tuple[float, str] | None] = lambda _: None

    def draw(self, frame: pd.DataFrame, canvas: Canvas) -> None:
        """A panel for each facet and y axis, with names beside lines or points.

        Raises NoRunsError if none shows a run.
        """
        if self.x.names and len(self.x.names(frame)) == 1:
            own = {key: getattr(self, key) for key in ("table", "hue", "look", "name", "hollow")}
            # in the order of the table
            Rows(values=self.values, blocks=self.facet, **own).draw(frame, canvas)
            return
        frame = self._sorted(frame)
        labels = self._labels(frame)
        cells = list(itertools.product(self.facet(frame), self._drawn(frame)))
        if all(self._lacks(part.dropna(subset=self.x.column), y) for (_, part), y in cells):
            raise NoRunsError(f"no run has what is drawn: {self.values[0].quantity(frame)}")
        axes = panels.grid(canvas, len(cells), 3.0 if self.means else 2.5)
        for ((title, part), y), ax in zip(cells, axes, strict=True):
            self.plot(part, ax, y, labels)
            ax.set_title(title)
        for y in self.values:
            shared = [ax for (_, its), ax in zip(cells, axes, strict=True) if its is y]
            panels.share_limits(shared)
            for ax in shared:
                panels.name_values(ax, y.name(frame), "y")
        panels.label_outer(axes)
        if self.means:
            panels.name_lines(canvas, axes)
        else:
            panels.name_points(canvas, axes[0])
        if self.x.names:
            panels.turn_names(canvas, axes)

    def plot(self, whole: pd.DataFrame, ax: Axes, y: Axis, labels: dict) -> None:
        """One panel."""
        x = self.x
        frame = y.where(whole.dropna(subset=x.column))
        named = x.names(whole) if x.names else {}
        places = frame[x.column].map([*named].index) if named else frame[x.column]
        places, values = places.astype(float), frame[y.column]
        is_log = panels.is_log(values, y.log)
        hues, shapes = frame[self.hue], {}
        width = (SLOTS if y.median else SLOTS / 2) * bool(named)  # bars need more than points
        slots = hues.map(marks.slots(hues.unique(), width))
        side = SIDE / hues.nunique() if named else 0
        spread = side * marks.spread(places + slots, values, is_log)
        for hue, part in frame.groupby(self.hue, sort=False):
            color, dashes = self.look(part.iloc[0])
            slot = slots[part.index[0]]
            marks.draw_runs(
                ax, places[part.index] + slot, values[part.index],
                color=color, label=labels[hue], dashes=dashes,
                means=self.means, median=y.median,
                marker="o" if self.means else shapes.setdefault(color, MARKERS[len(shapes)]),
                spread=spread[part.index],
                every=[place + slot for place in (range(len(named)) if named else places)],
            )  # fmt: skip
        ax.set_xlabel(x.name(frame))
        if named:
            ax.set_xticks(range(len(named)), named.values())
            last = len(named) - 1 if y.median else max(places, default=0)
            ax.set_xlim(-0.45, last + 0.45)
        elif x.log:
            panels.number_axis(ax, frame[x.column])
        panels.value_axis(ax, is_log)
        if y.least:
            marks.mark_below(ax, places + slots, values, y.least)
        if y.median:
            for place in {*range(len(named))} - {*places}:
                at = {"transform": ax.get_xaxis_transform(), "ha": "center", "va": "center"}
                ax.text(place, marks.LOW, "none", **at, **marks.SMALL)
        if y.reference is not None:
            marks.draw_reference(ax, y.reference, y.equal, "y")
        shade = self.shade(whole)
        start = [*named].index(shade[0]) - 0.5 if shade else np.inf
        if start < ax.get_xlim()[1]:
            ax.axvspan(start, ax.get_xlim()[1], color=SHADE, alpha=0.75, lw=0, zorder=3)
            look = {"fontsize": 6.5, "transform": ax.get_xaxis_transform()}
            ax.text(start + 0.08, 0.02, shade[1], zorder=4, **look)

    def caption(self, frame: pd.DataFrame) -> str:
        """Adds what points are."""
        means = "; lines: their means, with gaps at values without runs" * self.means
        return f"{super().caption(frame)} Points: runs{means}; a cross: a run without a value."

    def _drawn(self, frame: pd.DataFrame) -> list[Axis]:
        return super()._drawn(frame.dropna(subset=self.x.column))


@dataclass(eq=False, kw_only=True)
class Rows(OfRuns):
    """A row for each hue: a point for each run, and a bar at their mean with its interval.

    A vertical line is at the reference, or else at the mean of the row in bf16, if a block or the
    panel has one.

    Attributes:
        blocks: divides the rows of a panel into blocks, with titles.
        size: width, in columns of text, of a panel.
    """

    blocks: Facet = in_one_panel
    size: float = 1.0

    def draw(self, frame: pd.DataFrame, canvas: Canvas) -> None:
        """A panel for each facet and axis. Raises NoRunsError if none shows a run."""
        frame = self._sorted(frame)
        labels, shown = self._labels(frame), self._drawn(frame)
        is_shown = pd.concat([axis.where(frame) for axis in shown]).index
        facets = self.facet(frame[frame.index.isin(is_shown)]) if len(is_shown) else []
        if not facets or all(self._lacks(frame, axis) for axis in shown):
            raise NoRunsError(f"no run has what is drawn: {shown[0].quantity(frame)}")
        parts = [(title, self._rows(part, labels)) for title, part in facets]
        num = len(parts) * len(shown)
        lines = max(axis.name(frame).count("\n") for axis in shown)
        height = REST + 0.13 * lines + HEIGHT * max(len(rows) for _, rows in parts)
        axes = panels.grid(canvas, num, height)
        canvas.set_figwidth(self.size * canvas.get_figwidth())
        cells = itertools.product(parts, shown)
        for ((title, rows), axis), ax in zip(cells, axes, strict=True):
            self.plot(rows, ax, axis)
            ax.set_title(title)
        panels.label_outer(axes)

    def plot(self, rows: list[tuple[str, pd.DataFrame]], ax: Axes, axis: Axis) -> None:
        """One panel: names of rows with their runs, and titles of blocks without runs."""
        shown = axis.where(pd.concat([part for _, part in rows])).index
        parts = [part[part.index.isin(shown)] for _, part in rows]
        places = pd.concat([pd.Series(i, part.index) for i, part in enumerate(parts)])
        whole = pd.concat(parts)
        values = whole[axis.column].astype(float)
        is_log = panels.is_log(values, axis.log)
        spread = marks.spread(places, values, is_log)
        for i, part in enumerate(parts):
            if part.empty and len(rows[i][1]):
                marks.note_in_row(ax, i, "none")
            elif len(part):
                own = values[part.index]
                sample = axis.interval(own)
                hollow = (self.hollow[0](part), self.hollow[1]) if self.hollow else None
                middle = sample.mean if sample else own.median() if axis.median else own.mean()
                marks.draw_row(
                    ax, i, own, middle, self.look(part.iloc[0])[0],
                    spread=spread[part.index], hollow=hollow,
                    ends=(sample.low, sample.high) if sample else None, note=axis.note(part),
                )  # fmt: skip
        if axis.reference is None:
            self._mark_bf16(parts, ax, axis.column)
        panels.value_axis(ax, is_log, "x")
        marks.name_rows(ax, [name for name, _ in rows], [part.empty for _, part in rows])
        if axis.reference is not None:
            marks.draw_reference(ax, axis.reference, axis.equal, "x")
        if any(axis.note(part) for part in parts if len(part)):
            marks.note_row(ax, -1 if len(parts[0]) else 0, axis.noted)
        panels.name_values(ax, axis.name(whole), "x")

    def _rows(self, frame: pd.DataFrame, labels: dict) -> list[tuple[str, pd.DataFrame]]:
        """Names of rows with their runs; before those of a block, its title without runs."""
        rows = []
        for title, block in self.blocks(frame):
            named = [(labels[hue], part) for hue, part in block.groupby(self.hue, sort=False)]
            rows += [(title, block[:0])] * (title not in ("", named[0][0])) + named
        return rows

    @staticmethod
    def _mark_bf16(parts: list[pd.DataFrame], ax: Axes, column: str) -> None:
        """A line at the mean of the only row in bf16, or of that of each block, besides others."""
        is_base = [set(part["precision"]) == {"bf16"} for part in parts]
        blocks = np.cumsum([part.empty and sum(is_base) > 1 for part in parts])
        for block in set(blocks):
            rows = [i for i, part in enumerate(parts) if blocks[i] == block and len(part)]
            bases = [i for i in rows if is_base[i]]
            if len(bases) == 1 < len(rows):
                middle = parts[bases[0]][column].mean()
                ax.vlines(middle, rows[0] - 0.5, rows[-1] + 0.5, color=style.OTHER, lw=0.8,
                          zorder=0.5)  # fmt: skip

    def caption(self, frame: pd.DataFrame) -> str:
        """Adds what points are."""
        text = "Points: runs; bars: their means; a cross: a run without a value."
        return f"{super().caption(frame)} {text}"
