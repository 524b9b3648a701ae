"""`Points`, a row of `analysis/figures`: a point for each run."""

import itertools
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from analysis import naming, panels, style
from analysis.grammar import Axis, Facet, Figure, in_one_panel
from analysis.load import Runs

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
APART, ROOM = 0.2, 0.7  # of the distance of two named values: between hues, and for all of them
APART_ON_LINES = 0.06
WRAP = 13  # characters of a line of a hue's name below its points
CROWD = 8  # runs at one place; more are spread


@dataclass(eq=False, kw_only=True)
class Points(Figure):
    """A point for each run, by its values on two axes.

    Attributes:
        table: the frame of the selected runs: one row per run, with `measures.OF_A_RUN`.
        x, y: each pair of them has a panel if a run has both values; a run without y has a cross.
        hue: the column whose values have colors; those in `order` come first.
        look: the color and the line style of a hue, by its first row.
        name: the name of a hue, by its first row. What all methods share is left out.
        means: "bar" at the mean of the runs at one place, "line" through the means, or "".
        hollow: marks the runs that have open points.
        facet: divides the frame into panels, with titles.
    """

    table: Callable[[Runs], pd.DataFrame]
    x: tuple[Axis, ...]
    y: tuple[Axis, ...]
    hue: str = "method"
    order: tuple = ()
    look: Callable[[pd.Series], tuple] = style.look
    name: Callable[[pd.Series], str] | None = None
    means: str = "bar"
    hollow: Callable[[pd.DataFrame], pd.Series] | None = None
    facet: Facet = in_one_panel

    def query(self, runs: Runs) -> pd.DataFrame:
        """The table of the selected runs."""
        return self.table(self.selected(runs))

    def draw(self, frame: pd.DataFrame, canvas: Canvas) -> None:
        """A panel for each facet and pair of axes, with a legend below or names beside lines."""
        frame = frame.sort_values(self.hue, key=lambda hues: hues.map(self._rank), kind="stable")
        if self.hue == "method":
            ranks = frame["precision"].map(lambda name: naming.rank(name, naming.PRECISIONS))
            frame = frame.loc[ranks.sort_values(kind="stable").index]
        parts, labels = self.facet(frame), self._labels(frame)
        pairs = [(self._axis(x, frame, labels), y) for x, y in self._pairs(frame)]
        cells = [
            ("" if i else title, part, *pair)
            for title, part in parts
            for i, pair in enumerate(pairs)
        ]
        beside = self.means == "line" and all(x.names for x in self.x)
        axes = panels.grid(canvas, len(cells), 3.0 if beside else 2.5)
        for (title, part, x, y), ax in zip(cells, axes, strict=True):
            is_named = not beside or len(parts) > 1 or ax is axes[-1]
            self.plot(part, ax, x, y, labels if is_named else dict.fromkeys(labels))
            gray = f"gray: the margin of equality, {y.equal:g}%" if y.equal else ""
            ax.set_title("\n".join(filter(None, [title, gray])))
        for y in self.y:
            shared = [ax for (*_, its), ax in zip(cells, axes, strict=True) if its is y]
            panels.share_limits(shared)
            if shared and y.name(frame).endswith("(%)") and shared[0].get_ylim()[0] > 0:
                for ax in shared:
                    ax.set_ylabel(y.name(frame).removesuffix(")") + ", axis not from 0)")
        panels.label_outer(axes)
        if beside:
            panels.name_lines(canvas, axes)
        elif not self.means and len(axes) == 1:
            panels.name_points(canvas, axes[0])
        elif self.hue not in (x.column for x, _ in pairs):
            panels.legend_below(canvas, axes, labels.values())

    def plot(self, frame: pd.DataFrame, ax: Axes, x: Axis, y: Axis, labels: dict) -> None:
        """One panel."""
        if y.reference is not None:
            ends = y.reference - y.equal, y.reference + y.equal
            ax.axhspan(*ends, color="0.92", lw=0, zorder=0)
            ax.axhline(y.reference, color=style.OTHER, lw=0.8, zorder=0.5)
        frame = frame[frame[x.column].notna()]
        places = self._places(frame, x)
        every = {*range(len(x.names(frame)))} if x.names else {*places}
        for i, (hue, part) in enumerate(frame.groupby(self.hue, sort=False)):
            color, dashes = self.look(part.iloc[0])
            panels.draw_runs(
                ax, places[part.index], part[y.column],
                color=color, label=labels[hue], means=self.means, dashes=dashes,
                marker="o" if self.means else MARKERS[i % len(MARKERS)],
                hollow=self.hollow(part) if self.hollow else None,
                spread=self._spread(places[part.index]) if x.names else 0.0,
                every=every - {*places[part.index].round()} if self.means == "line" else (),
            )  # fmt: skip
        ax.set(xlabel=x.name(frame), ylabel=y.name(frame))
        if x.names:
            named = x.names(frame)
            panels.name_places(ax, named.values())
            room = 0.3 if self.means == "line" else 0.5
            ax.set_xlim(-room, len(named) - 1 + room)
        elif x.log:
            panels.number_axis(ax, frame[x.column])
        panels.value_axis(ax, y.log)

    def words(self, frame: pd.DataFrame) -> str:
        """The y axes."""
        return naming.join(dict.fromkeys(y.quantity(frame) for _, y in self._pairs(frame)))

    def caption(self, frame: pd.DataFrame) -> str:
        """Adds what points are."""
        means = f"; {self.means}s: their means" if self.means else ""
        means += ", dotted across a value without runs" * (self.means == "line")
        return f"{super().caption(frame)} Points: runs{means}; a cross: a run without a value."

    def _pairs(self, frame: pd.DataFrame) -> list[tuple[Axis, Axis]]:
        """The pairs of axes on which a run has both values, or else the first pair."""
        pairs = list(itertools.product(self.x, self.y))
        drawn = [frame[[x.column, y.column]].notna().all(axis=1).any() for x, y in pairs]
        return list(itertools.compress(pairs, drawn)) or pairs[:1]

    def _axis(self, x: Axis, frame: pd.DataFrame, labels: dict) -> Axis:
        """`x`; if it has one value and runs have bars, an axis that names their hues instead."""
        if self.means != "bar" or not x.names or len(x.names(frame)) > 1:
            return x
        names = {hue: textwrap.fill(labels[hue], WRAP) for hue in frame[self.hue].unique()}
        return Axis(column=self.hue, label=x.names(frame).popitem()[1], names=lambda _: names)

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

    def _rank(self, hue: str) -> int:
        return self.order.index(hue) if hue in self.order else len(self.order)

    def _places(self, frame: pd.DataFrame, x: Axis) -> pd.Series:
        """The place of each row; hues stand side by side at a value with a name."""
        values, hues = frame[x.column], frame[self.hue]
        if not x.names:
            return values.astype(float)
        at = values.map(list(x.names(frame)).index).astype(float)
        there = pd.DataFrame({"at": at, "hue": hues}).drop_duplicates()
        num = there.groupby("at")["hue"].transform("size")
        shifts = there.groupby("at").cumcount() - (num - 1) / 2
        apart = APART_ON_LINES if self.means == "line" else min(APART, ROOM / num.max())
        shifts = shifts.set_axis(pd.MultiIndex.from_frame(there)) * apart
        return at + shifts.loc[zip(at, hues, strict=True)].to_numpy()

    @staticmethod
    def _spread(places: pd.Series) -> pd.Series:
        """How far each of more than CROWD runs at one place moves sideways."""
        crowd = places.groupby(places)
        size, rank = crowd.transform("size"), crowd.cumcount()
        return (0.3 * (rank / (size - 1) - 0.5)).where(size > CROWD, 0)
