"""The plots of the report as plotly figures; report.js handles clicks on them.

Plotly reads names and texts as markup, so everything that comes from a run is escaped here.
"""

import textwrap
from html import escape

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from matplotlib.colors import to_hex
from plotly.subplots import make_subplots

from analysis import style
from analysis.report.collect import RunData

FONT = {
    "family": "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif",
    "size": 13,
    "color": "#222",
}
AXIS = {"gridcolor": "#ebebeb", "linecolor": "#999", "zeroline": False, "ticks": "outside",
        "tickcolor": "#999"}  # fmt: skip
TICK = 40  # characters of a method beside its dots; the whole name appears on hover
PALEST = 1.7  # for `style.color`: many settings stay visible on white


def looks(summaries: pd.DataFrame) -> list[tuple[str, str]]:
    """Color and dash of each run: its method's in every figure, paler by setting."""
    pale = min(1.0, PALEST / max(1, summaries["variant"].max()))
    result = []
    for row in summaries.to_dict("records"):
        if pd.isna(row["precision.label"]):  # its config is damaged
            result.append((style.OTHER, "solid"))
            continue
        shade = style.color(row["precision.label"], row["optimizer.name"], row["variant"] * pale)
        result.append((to_hex(shade), dash(row["optimizer.name"])))
    return result


def dash(optimizer: str) -> str:
    """The line style of an optimizer in plotly's notation."""
    pattern = style.line_style(optimizer)
    if pattern == "-":
        return "solid"
    return ",".join(f"{2.2 * length:g}px" for length in pattern[1])


def curve_figure(runs: list[RunData], labels: list[str], looks: list[tuple[str, str]]) -> go.Figure:
    """Loss above RMS_t over shared steps; each trace's `meta` holds its run and kind."""
    figure = make_subplots(rows=2, shared_xaxes=True, vertical_spacing=0.05, row_heights=[0.6, 0.4])
    few = len(runs) <= 24
    for i, (run, label, (color, dashes)) in enumerate(zip(runs, labels, looks, strict=True)):
        for name in ("loss", "rms", "max"):
            for smooth, frame in ((False, run.curves), (True, run.smooth)):
                value = ("mean " if smooth else "") + ("loss" if name == "loss" else "RMS")
                hover = f"step %{{x:,}}, {value} %{{y:.4g}}<extra>{escape(label)}</extra>"
                trace = go.Scatter(
                    x=frame["step"].to_numpy(),
                    y=frame[name].to_numpy(),
                    mode="lines",
                    name=escape(label),
                    meta={"run": i, "kind": name, "smooth": smooth},
                    line={"color": color, "width": 1.8 if smooth else 1,
                          "dash": dashes if smooth and few else "solid"},
                    hovertemplate=hover,
                )  # fmt: skip
                figure.add_trace(trace, row=1 if name == "loss" else 2, col=1)
        if len(run.spikes):
            figure.add_trace(_spike_trace(i, run, label, color), row=1, col=1)
    figure.update_layout(
        height=620, margin={"l": 64, "r": 16, "t": 12, "b": 48}, font=FONT, showlegend=False,
        plot_bgcolor="white", paper_bgcolor="white", hovermode="closest", template="none",
        hoverlabel={"align": "left", "namelength": -1},
    )  # fmt: skip
    figure.update_xaxes(**AXIS, tickformat=",d")
    figure.update_xaxes(title="step", row=2, col=1)
    figure.update_yaxes(**AXIS, title="training loss", range=_loss_range(runs), row=1, col=1)
    figure.update_yaxes(**AXIS, title="RMS<sub>t</sub>", type="log", row=2, col=1)
    figure.update_yaxes(row=2, col=1, tickvals=[0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100])
    for threshold in sorted({run.protocol.rms_threshold for run in runs}):
        figure.add_hline(y=threshold, line={"color": "#666", "width": 1, "dash": "4px,3px"},
                         row=2, col=1)  # fmt: skip
    return figure


def _spike_trace(i: int, run: RunData, label: str, color: str) -> go.Scatter:
    return go.Scatter(
        x=run.spikes["step"].to_numpy(np.int32),
        y=run.spikes["loss"].to_numpy(np.float32),
        mode="markers",
        name=escape(label),
        meta={"run": i, "kind": "spike", "smooth": False},
        marker={"symbol": "triangle-down", "size": 10, "color": color,
                "line": {"color": "white", "width": 1}},
        hovertemplate=f"loss spike at step %{{x:,}}<extra>{escape(label)}</extra>",
    )  # fmt: skip


def _loss_range(runs: list[RunData]) -> list[float] | None:
    """Covers 199 of 200 losses, so that a run that exploded hides no other."""
    losses = np.concatenate([run.curves["loss"].to_numpy() for run in runs])
    losses = losses[np.isfinite(losses)]
    if not len(losses):
        return None
    low, high = float(losses.min()), float(np.quantile(losses, 0.995))
    margin = 0.04 * max(high - low, 1e-6)
    return [low - margin, high + 2 * margin]


def speed_figure(
    runs: list[RunData], labels: list[str], methods: list[str], colors: list[str]
) -> go.Figure:
    """One dot per run: images per second and, beside it, memory; by method."""
    order = list(dict.fromkeys(methods))
    figure = make_subplots(cols=2, shared_yaxes=True, horizontal_spacing=0.04)
    panels = (
        ("images_per_s", "images per second", "%{x:,.0f}"),
        ("memory_gib", "peak GiB", "%{x:.2f}"),
    )
    for column, (name, title, form) in enumerate(panels, 1):
        figure.add_trace(
            go.Scatter(
                x=[run.speed[name] for run in runs],
                y=[order.index(method) for method in methods],
                mode="markers",
                customdata=list(range(len(runs))),
                text=[_lines(label) for label in labels],
                marker={"size": 11, "color": colors, "opacity": 0.75,
                        "line": {"color": "white", "width": 1}},
                hovertemplate=f"{form} {title}<extra>%{{text}}</extra>",
            ),
            row=1,
            col=column,
        )  # fmt: skip
        figure.update_xaxes(**AXIS, title=title, rangemode="tozero", row=1, col=column)
    ticks = [name if len(name) <= TICK else f"{name[: TICK - 1]}\u2026" for name in order]
    figure.update_yaxes(**AXIS, tickvals=list(range(len(order))), ticktext=list(map(escape, ticks)),
                        range=[len(order) - 0.5, -0.5], automargin=True)  # fmt: skip
    figure.update_layout(
        height=130 + 26 * min(len(order), 40), margin={"l": 8, "r": 16, "t": 8, "b": 48}, font=FONT,
        showlegend=False, plot_bgcolor="white", paper_bgcolor="white", template="none",
    )  # fmt: skip
    return figure


def _lines(label: str) -> str:
    """A long label in lines that fit a hover box."""
    return "<br>".join(escape(line) for line in textwrap.wrap(label, 60))
