"""Figures as data: which runs and values a figure shows, and its axes, panels and colors.

`FIGURES` of `analysis/figures` has a row for each figure: `Lines`, `Points` (`analysis/points.py`),
or `Panels` that functions draw.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from analysis import bench, comparison, marks, measures, naming, panels, spike_marks, style
from analysis.evidence import Sample
from analysis.load import Runs

Select = Callable[[pd.DataFrame], pd.DataFrame]
Facet = Callable[[pd.DataFrame], list[tuple[str, pd.DataFrame]]]
ANYTHING = ("*",)  # of `same_but`


def in_one_panel(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """One panel without a title."""
    return [("", frame)]


def by(columns: str | list[str], title: Callable[[Any], str] = str) -> Facet:
    """A function that makes a part for each value of some columns, in order of appearance."""
    return lambda frame: [(title(v), part) for v, part in frame.groupby(columns, sort=False)]


def by_model(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """A panel for each model, from small to large."""
    models = sorted(set(frame["model"]), key=naming.order("model.name"))
    return [(naming.model(name), frame[frame["model"] == name]) for name in models]


@dataclass(eq=False, kw_only=True)
class Figure:
    """Which runs or lines a figure shows.

    A figure also has `draw(frame, canvas)`, which sets the size and draws all panels.

    Attributes:
        studies: the experiments that make the runs. The first one that has runs at a scale is
            drawn; with `same_but`, runs of the others join those of the first one.
        same_but: config keys, besides the seed, in which runs of the other studies may differ from
            one of the first; `*` for all of them.
        where: selects from rows of `Runs.runs` those that the figure is about.
        lines: the slug of a benchmark, whose lines are drawn in place of runs.
        table: makes the frame of the selected runs, with `measures.OF_A_RUN`, or of the lines, with
            the columns `file` and perhaps `source`, the device.
        what: what the figure shows, the first words of the caption.
        text: its sentences after the runs.
        title: the finding in a sentence, computed from the frame, or "" for `words`.
        shows: whether the runs of a frame can show such a finding; if not, the title is `words`.
    """

    studies: tuple[str, ...] = ()
    same_but: tuple[str, ...] = ()
    where: Select = lambda heads: heads
    lines: str = ""
    table: Callable[[Any], pd.DataFrame] | None = None
    what: str = ""
    text: str = ""
    title: Callable[[pd.DataFrame], str] = lambda _: ""
    shows: Callable[[pd.DataFrame], bool] = lambda _: True

    @property
    def sources(self) -> tuple[str, ...]:
        """The studies of which the first with runs is drawn."""
        return self.studies[:1] if self.same_but else self.studies

    def source(self, summaries: pd.DataFrame, scale: str | None) -> str:
        """The study of `sources` that has runs at a scale, or else the first one."""
        if len(summaries):
            at = summaries["scale"]
            summaries = summaries[(scale is None) | (at == scale) | at.isna()]
        made = set(summaries["experiment"])
        return next((name for name in self.sources if name in made), self.sources[0])

    def select(self, heads: pd.DataFrame) -> pd.DataFrame:
        """The rows of `Runs.runs` that the figure is about."""
        if self.same_but and self.same_but != ANYTHING:
            heads = comparison.with_baselines(heads, self.studies[0], *self.same_but)
        return self.where(heads)

    def selected(self, runs: Runs) -> Runs:
        """The runs that the figure is about."""
        return runs.where(runs.summaries["run"].isin(self.select(runs.runs)["run"]))

    def query(self, source: Runs | pd.DataFrame) -> pd.DataFrame:
        """Exactly the plotted numbers, of runs or of benchmark lines."""
        return self.table(source if self.lines else self.selected(source))

    def caption(self, frame: pd.DataFrame) -> str:
        """States what is shown, of which runs, and which diverged; or the device of the lines."""
        if self.lines:
            return self.text + (
                f" Measured on {bench.devices(frame)}." if "source" in frame else ""
            )
        what = self.words(frame)
        text = f"{what[0].upper()}{what[1:]} of {measures.of_runs(frame)}. {self.text}".rstrip()
        if set(spike_marks.THRESHOLDS) <= set(frame):
            text += f" {spike_marks.describe_protocols(frame)}"
        return text + measures.caption_end(frame)

    def words(self, frame: pd.DataFrame) -> str:
        """The first words of the caption."""
        return self.what

    def heading(self, frame: pd.DataFrame) -> str:
        """What stands above the figure: the finding, if the runs can show it, or else `words`."""
        words = self.words(frame)
        words = words[:1].upper() + words[1:].rstrip(",")
        return (self.shows(frame) and self.title(frame)) or words


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis that shows a column of a frame.

    Attributes:
        column: the column.
        label: of the axis, or a function of the frame.
        names: the values in order, which stand at equal distances, with their names; else numbers.
        log: whether the axis is logarithmic; None: if its values differ by more than `panels.WIDE`.
        reference: where a line is drawn; values up to `equal` from it have a gray band.
        where: selects the rows that it shows.
        interval: the mean of runs with its interval, which is drawn, or None.
        least: where the axis begins; a triangle is a value below.
        median: whether a bar at their median, not a line through means, shows the middle of runs.
        note: a text about the runs of a row, which stands beside it; `noted` says what it is.
    """

    column: str
    label: str | Callable[[pd.DataFrame], str]
    names: Callable[[pd.DataFrame], dict] | None = None
    log: bool | None = False
    reference: float | None = None
    equal: float = 0.0
    where: Select = lambda frame: frame
    interval: Callable[[pd.Series], Sample | None] = lambda _: None
    note: Callable[[pd.DataFrame], str] = lambda _: ""
    noted: str = ""
    least: float | None = None
    median: bool = False

    def name(self, frame: pd.DataFrame) -> str:
        """The label."""
        return self.label if isinstance(self.label, str) else self.label(frame)

    def quantity(self, frame: pd.DataFrame) -> str:
        """The label without its unit."""
        return self.name(frame).partition(" (")[0].replace("\n", " ")


@dataclass(frozen=True, kw_only=True)
class Hue:
    """What the colors of lines tell: by default methods.

    Attributes:
        keys: config keys that it shows, which the names of methods leave out.
        name: the name of a run, by its row of `measures.named_heads`.
        is_method: whether the name takes the place of the method.
        order: sorts the runs of a panel.
        look: the color and the line style, by the first row of a line.
    """

    keys: tuple[str, ...] = ()
    name: Callable[[pd.Series], str] | None = None
    is_method: bool = False
    order: Callable[[pd.Series], Any] = lambda _: 0
    look: Callable[[pd.Series], tuple] = style.look

    def labels(self, heads: pd.DataFrame) -> list[str]:
        """The labels of the runs of a panel: name, method if it is not shared, and end."""
        if not self.name:
            return list(heads["label"])
        texts = [self.name(head) for _, head in heads.iterrows()]
        if not self.is_method:
            return measures.with_setting(heads, texts)
        if heads["optimizer"].groupby(texts).nunique().gt(1).any():
            names = map(naming.optimizer_name, heads["optimizer"])
            texts = [", ".join(pair) for pair in zip(texts, names, strict=True)]
        methods = map(naming.method, heads["precision"], heads["optimizer"])
        ends = map(str.removeprefix, heads["label"], methods)
        return [text + end for text, end in zip(texts, ends, strict=True)]


@dataclass(eq=False, kw_only=True)
class Lines(Figure):
    """A line for each run, by step.

    Attributes:
        y: a recorded quantity (see `measures.recorded`).
        hue: what the colors tell.
        facet: config key with a panel for each value; `label`: a panel for each label; "": one.
        split: divides a panel again, such as by family.
        smooth: whether lines are centered box averages (`style.smooth`).
        spikes: whether loss spikes are marked and counted, and each run of a label has a tone.
        band: config key, besides the seed, in which runs of one label may differ; their median, in
            a band from the smallest to the largest, takes the place of their lines.
    """

    y: Axis = Axis(column="loss", label="training loss (nats)")
    hue: Hue = Hue()
    facet: str = "model.name"
    split: Facet = in_one_panel
    smooth: bool = False
    spikes: bool = False
    band: str = ""

    def query(self, runs: Runs) -> pd.DataFrame:
        """One row per recorded step of each run, with the median of a band.

        A step without a row has no loss, so that its line has a gap.
        """
        runs = self.selected(runs)
        own = [key for key in (self.facet, self.band) if key not in ("label", "model.name", "")]
        keys = tuple(dict.fromkeys([*own, *self.hue.keys]))
        heads, y = measures.named_heads(runs, keys), self.y.column
        facets = pd.Series("", heads.index)
        if self.column in heads and self.facet != "label":
            facets = heads[self.column]
        for _, part in heads.groupby(facets, dropna=False):
            heads.loc[part.index, "label"] = self.hue.labels(part)
        ranks = facets.map(naming.order(self.facet))
        order = [self.hue.order(head) for _, head in heads.iterrows()]
        heads = heads.assign(rank=ranks, order=order).sort_values(["rank", "order"], kind="stable")
        keys = (measures.RENAMED.get(key, key) for key in keys)
        columns = dict.fromkeys([*measures.OF_A_RUN, *keys, "step", y, *["height"] * self.spikes])
        frame = measures.by_run(runs, heads, tuple(columns), self._of_run)
        if not self.band:
            return frame
        by = [*dict.fromkeys(filter(None, ["model", self.column, "label"])), "step"]
        return frame.assign(median=frame.groupby(by, dropna=False)[y].transform("median"))

    def _of_run(self, run: Runs, head: dict) -> pd.DataFrame:
        table = measures.recorded(run, self.y.column).reindex(columns=["step", self.y.column])
        if table[self.y.column].isna().all() and head["state"] != "diverged":
            return table.head(0)
        if self.spikes:
            spikes = spike_marks.spikes_of_run(run, head)[["step", "height"]]
            table = table.merge(spikes, on="step", how="left")
        return table

    @property
    def column(self) -> str:
        """The column of the values that have a panel."""
        return measures.RENAMED.get(self.facet, self.facet)

    def parts(self, frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
        """The title and the rows of each panel, in order."""
        facets = frame[self.column] if self.facet else pd.Series("", frame.index)
        return [
            (self._title(value, title, panel), panel)
            for value, part in frame.groupby(facets, sort=False, dropna=False)
            for title, panel in self.split(part)
        ]

    def _title(self, value: Any, title: str, panel: pd.DataFrame) -> str:
        title = ", ".join(filter(None, [naming.setting(self.facet, value), title]))
        if self.spikes:
            title += f", {comparison.counted(panel['run'].nunique(), 'run')}"
            count = comparison.counted(panel["height"].count(), "spike")
            large = (panel["height"] > spike_marks.LARGE).sum()
            title += f"\n{count}, {large} over {spike_marks.LARGE:g} nat "
            title += "\N{BLACK DOWN-POINTING TRIANGLE}"
        return title

    def draw(self, frame: pd.DataFrame, canvas: Canvas) -> None:
        """The panels, on one scale, above one legend."""
        parts = self.parts(frame)
        axes = panels.grid(canvas, len(parts))
        for (title, part), ax in zip(parts, axes, strict=True):
            self.plot(part, ax, frame)
            ax.set_title(title)
        panels.share_limits(axes)
        panels.label_outer(axes)
        if self.facet != "label" and not self._has_one_color(frame):
            panels.name_lines(canvas, axes)

    def _has_one_color(self, frame: pd.DataFrame) -> bool:
        """Whether all runs have one value of what colors tell, which the caption gives."""
        return bool(self.hue.name) and frame["label"].nunique() == 1

    def plot(self, frame: pd.DataFrame, ax: Axes, whole: pd.DataFrame) -> None:
        """One panel, with the loss axis of the whole figure."""
        for label, runs in frame.groupby("label", sort=False):
            self._draw_label(runs, ax, label)
        if self.y.column == "loss":
            panels.loss_axis(ax, whole)
            panels.draw_chance(ax, frame["batch_size"])
        else:
            panels.value_axis(ax, panels.is_log(frame[self.y.column], self.y.log))
        for _, run in frame.groupby("run"):
            color = self.hue.look(run.iloc[0])[0]
            if run["state"].iloc[0] == "diverged":
                panels.mark_end(ax, run["step"], run[self.y.column], color)
            elif self.y.column == "loss":
                panels.mark_above(ax, run, color)
            if self.spikes:
                marks.mark_spikes(ax, run)
        ax.set(xlim=(0, frame["step"].max()), ylabel=self.y.label)
        panels.step_axis(ax)

    def _draw_label(self, runs: pd.DataFrame, ax: Axes, label: str) -> None:
        """Draws the runs that share a label, which names averaged lines or the middle one."""
        y, (color, dashes) = self.y.column, self.hue.look(runs.iloc[0])
        look = {"color": color, "ls": dashes}
        if self.band:
            ends = runs.groupby("step")[y].agg(["min", "max"])
            ax.fill_between(ends.index, ends["min"], ends["max"], color=color, alpha=0.2, lw=0)
            median = runs.drop_duplicates("step").sort_values("step")
            ax.plot(median["step"], median["median"], lw=1.1, label=label, **look)
            return
        last = runs.groupby("run", sort=False)[y].last().sort_values()
        middle = last.index[(len(last) - 1) // 2]
        tones = style.tones(color, len(last)) if self.spikes else [color] * len(last)
        for tone, (name, run) in zip(tones, runs.groupby("run", sort=False), strict=True):
            values = style.smooth(run[y]) if self.smooth else run[y]
            look["color"], look["label"] = tone, label if self.smooth or name == middle else None
            ax.plot(run["step"], values, lw=1 if self.smooth else 0.6, rasterized=True, **look)

    def words(self, frame: pd.DataFrame) -> str:
        """The y axis."""
        return self.y.quantity(frame)

    def caption(self, frame: pd.DataFrame) -> str:
        """Adds what lines and the loss axis are."""
        text = super().caption(frame) + " Lines: runs"
        text += f", averaged over up to {style.SMOOTHING} steps." if self.smooth else "."
        if self.spikes:
            text += f" Triangles: loss spikes, filled if over {spike_marks.LARGE:g} nat."
        if self._has_one_color(frame):
            text += f" All runs: {frame['label'].iloc[0]}."
        if self.y.column == "loss":
            text += (
                " The loss axis ends at the largest loss, of runs that did not diverge, "
                f"{panels.IN_PRINT}, at most at twice the first loss."
            )
            if len(panels.above(frame, panels.cap(frame))):
                text += " Triangles at its upper edge are higher losses."
        return text


@dataclass(eq=False, kw_only=True)
class Panels(Figure):
    """Panels that functions draw, of runs or of benchmark lines.

    Attributes:
        plots: each draws a panel of each part of the frame.
        facet: divides the frame into parts, with titles.
        size: width, in columns of text, and height in inches of a panel, or a function of the
            frame.
    """

    plots: tuple[Callable[[pd.DataFrame, Axes], None], ...]
    facet: Facet = in_one_panel
    size: tuple[float, float] | Callable[[pd.DataFrame], tuple] = (1, 2.5)

    def draw(self, frame: pd.DataFrame, canvas: Canvas) -> None:
        """A column for each part and a row for each plot, whose panels share a y axis.

        The panels of one plot or one part stand in rows of two or three. A legend is below them,
        unless a panel has its own. Axes that the plots add share a y axis, too.
        """
        parts = self.facet(frame)
        width, height = self.size(frame) if callable(self.size) else self.size
        most = len(parts) if min(len(parts), len(self.plots)) > 1 else None
        axes = panels.grid(canvas, len(parts) * len(self.plots), height, most)
        canvas.set_figwidth(width * canvas.get_figwidth())
        for row, plot in enumerate(self.plots):
            of_plot = axes[row * len(parts) : (row + 1) * len(parts)]
            for (title, part), ax in zip(parts, of_plot, strict=True):
                plot(part, ax)
                if title and not row:
                    ax.set_title(title)
            panels.share_limits([ax for ax in of_plot if ax.axison])
        if added := [ax for ax in canvas.axes if ax not in axes]:
            panels.share_limits(added)
        panels.label_outer([ax for ax in axes if ax.axison])
        if not any(ax.get_legend() for ax in canvas.axes):
            panels.name_lines(canvas, axes)
