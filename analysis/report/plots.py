"""The plots of the report as plotly figures; report.js handles clicks on them.

Plotly reads names and texts as markup, so everything that comes from a run is escaped here.
"""

from html import escape

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from matplotlib.colors import to_hex
from plotly.subplots import make_subplots

from analysis import style
from analysis.report.collect import RunData, thin

FAMILY = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
FONT = {"family": FAMILY, "size": 13, "color": "#222"}
AXIS = {"gridcolor": "#ebebeb", "linecolor": "#999", "zeroline": False, "ticks": "outside",
        "tickcolor": "#999"}  # fmt: skip
PANELS = {"loss": "training loss", "rms": "RMS<sub>t</sub>", "grad_norm": "gradient norm",
          "lr": "learning rate", "accuracy": "accuracy"}  # fmt: skip
PALEST = 1.7  # for `style.color`: many settings stay visible on white


def looks(summaries: pd.DataFrame) -> list[tuple[str, str]]:
    """Color and dash of each run: its method's in every figure, paler by setting.

    If all runs share one precision, the settings have distinct colors, or else the optimizers. If
    all share one optimizer, their lines are solid.
    """
    last = summaries["variant"].max()
    pale = min(1.0, PALEST / max(1, last))
    methods = summaries.reindex(columns=["precision.label", "optimizer.name"])
    one_precision = methods["precision.label"].nunique() == 1
    several = methods["optimizer.name"].nunique() > 1
    by_optimizer = one_precision and several
    settings = summaries["method"].str.extract(r"\((.*)\)$", expand=False).fillna("")
    order = sorted(set(settings))
    result = []
    for row, setting in zip(summaries.to_dict("records"), settings, strict=True):
        if pd.isna(row["precision.label"]):  # its config is damaged
            result.append((style.OTHER, "solid"))
            continue
        if one_precision and last:
            shade = style.setting_color(order.index(setting), len(order) - 1)
        else:
            precision = "bf16" if by_optimizer else row["precision.label"]
            shade = style.color(precision, row["optimizer.name"], row["variant"] * pale)
        pattern = style.line_style(row["optimizer.name"]) if several else "-"
        lengths = [] if pattern == "-" else pattern[1]
        result.append((to_hex(shade), ",".join(f"{2.2 * n:g}px" for n in lengths) or "solid"))
    return result


def curve_figure(
    runs: list[RunData], labels: list[str], looks: list[tuple[str, str]]
) -> tuple[go.Figure, dict[str, int]]:
    """Panels over shared steps, those of PANELS with data; `meta`: a trace's run and kind.

    Also returns the row of each panel.
    """
    titles = {k: t for k, t in PANELS.items() if any(has_curve(run, k) for run in runs)}
    heights = [260 if kind == "loss" else 140 for kind in titles]
    num_rows, gap = len(titles), 14 / sum(heights)
    figure = make_subplots(num_rows, shared_xaxes=True, vertical_spacing=gap, row_heights=heights)
    rows = {kind: row for row, kind in enumerate(titles, 1)}
    for i, (run, label, (color, dashes)) in enumerate(zip(runs, labels, looks, strict=True)):
        name = escape(label)
        line = {"color": color, "width": 1, "dash": dashes}
        for frame in (run.curves, run.accuracy.rename("accuracy").reset_index()):
            _add_lines(figure, frame, name, {"run": i}, line, rows)
        if len(run.spikes):
            spikes = go.Scatter(
                x=run.spikes["step"].to_numpy(np.int32),
                y=run.spikes["loss"].to_numpy(np.float32),
                mode="markers",
                name=name,
                meta={"run": i, "kind": "spike"},
                marker={"symbol": "triangle-down", "size": 10, "color": color,
                        "line": {"color": "white", "width": 1}},
                hovertemplate=f"loss spike at step %{{x:,}}<extra>{name}</extra>",
            )  # fmt: skip
            figure.add_trace(spikes, row=1, col=1)
    figure.update_layout(
        height=sum(heights) + 130, margin={"l": 72, "r": 16, "t": 36, "b": 48}, font=FONT,
        showlegend=False, plot_bgcolor="white", paper_bgcolor="white", hovermode="closest",
        template="none", hoverlabel={"align": "left", "namelength": -1},
    )  # fmt: skip
    figure.update_xaxes(**AXIS, tickformat=",d")
    figure.update_xaxes(title="step", row=num_rows, col=1)
    for kind, row in rows.items():
        figure.update_yaxes(**AXIS, title=titles[kind], nticks=5, automargin=True, row=row, col=1)
        if kind in ("rms", "grad_norm"):
            figure.update_yaxes(type="log", tickformat="~g", nticks=3, row=row, col=1)
        if kind == "lr":  # a constant one, too, has a range that tells its value
            figure.update_yaxes(rangemode="tozero", row=row, col=1)
    limits = _loss_range(runs)
    figure.update_yaxes(range=limits, nticks=8, row=1, col=1)
    _mark_above(figure, runs, looks, limits[1])
    _add_references(figure, runs, rows)
    return figure, rows


def _mark_above(
    figure: go.Figure, runs: list[RunData], looks: list[tuple[str, str]], top: float
) -> None:
    """Marks the losses above the axis, which ends at `top`, at its edge."""
    for i, (run, (color, _)) in enumerate(zip(runs, looks, strict=True)):
        above = run.curves[np.isfinite(run.curves["loss"]) & (run.curves["loss"] > top)]
        if len(above):
            marks = go.Scatter(
                x=above["step"].to_numpy(np.int32),
                y=np.full(len(above), top),  # exact: plotly draws no point beyond the axis
                customdata=above["loss"].to_numpy(np.float32),
                mode="markers",
                cliponaxis=False,
                meta={"run": i, "kind": "above"},
                marker={"symbol": "triangle-up", "size": 7, "color": color},
                hovertemplate="step %{x:,}, loss %{customdata:.4g}: above the axis<extra></extra>",
            )
            figure.add_trace(marks, row=1, col=1)


def _add_references(figure: go.Figure, runs: list[RunData], rows: dict[str, int]) -> None:
    """Lines at chance, at the thresholds of RMS spikes and where the precision changes."""
    known = [run.summary for run in runs if run.summary.get("data.name") != "unknown"]
    sizes = {summary.get("batch_size", 0) for summary in known}
    for size in sorted(size for size in sizes if size > 0):  # NaN if the config is damaged
        line = {"color": "#666", "width": 1, "dash": "1px,3px"}
        figure.add_hline(y=float(np.log(size)), line=line, row=1, col=1)
    for threshold in sorted({run.protocol.rms_threshold for run in runs} if "rms" in rows else ()):
        line = {"color": "#666", "width": 1, "dash": "4px,3px"}
        figure.add_hline(y=threshold, line=line, row=2, col=1)
    changes = {}
    for run in runs:
        step, last = (run.summary.get(key) for key in ("precision_change.step", "num_steps"))
        if isinstance(step, int | float) and 0 < step <= last:
            changes.setdefault(step, set()).add(run.summary["precision.label"])
    for step, labels in sorted(changes.items()):
        text = escape(f"{', '.join(sorted(labels))} until here")
        note = {"annotation_text": text, "annotation_position": "top left"}
        figure.add_vline(x=step, line={"color": "#666", "width": 1}, row=1, col=1, **note)


def add_medians(
    figure: go.Figure,
    rows: dict[str, int],
    runs: list[RunData],
    groups: pd.Series,
    looks: list[tuple[str, str]],
    points: int,
) -> None:
    """Adds a thick line for the median of the runs of each group that has several."""
    for group, members in groups.groupby(groups).groups.items():
        if len(members) < 2:
            continue
        median = pd.concat([runs[i].whole for i in members]).groupby("step").median().reset_index()
        median = median.iloc[thin(median, points, [])]
        line = {"color": looks[members[0]][0], "width": 2.2}
        meta = {"run": int(members[0]), "median": True}
        _add_lines(figure, median, escape(group), meta, line, rows)


def has_curve(run: RunData, kind: str) -> bool:
    """Whether a run has two points of a kind of curve; the loss always has a panel."""
    if kind == "accuracy":
        return len(run.accuracy) > 1
    kinds = ("rms", "max") if kind == "rms" else (kind,)
    columns = [run.curves[name].count() for name in kinds if name in run.curves]
    return kind == "loss" or max(columns, default=0) > 1


def _add_lines(
    figure: go.Figure, frame: pd.DataFrame, name: str, meta: dict, line: dict, rows: dict[str, int]
) -> None:
    """Adds the curves of a run or median, RMS_t of the selected and of all tensors to one panel."""
    for kind in frame.columns.intersection([*PANELS, "max"], sort=False):
        if row := rows.get("rms" if kind == "max" else kind):
            text = "median" if "median" in meta else kind
            trace = go.Scatter(
                x=frame["step"].to_numpy(np.int32),
                y=frame[kind].to_numpy(np.float32),
                mode="lines",
                name=name,
                meta={**meta, "kind": kind},
                line=line,
                hovertemplate=f"step %{{x:,}}, {text} %{{y:.4g}}<extra>{name}</extra>",
            )
            figure.add_trace(trace, row=row, col=1)


def above(runs: list[RunData]) -> str:
    """A sentence on the losses above the axis, or ""."""
    losses = np.concatenate([run.whole["loss"].to_numpy() for run in runs])
    losses = losses[np.isfinite(losses) & (losses > _loss_range(runs)[1])]
    if not len(losses):
        return ""
    which = f"{len(losses):,} losses up to" if len(losses) > 1 else "A loss of"
    peak, verb = f"{losses.max():.3g}".replace("e+0", "e"), "are" if len(losses) > 1 else "is"
    return f"{which} {peak} {verb} above the axis: tick logarithmic loss to see them."


def _loss_range(runs: list[RunData]) -> list[float]:
    """Covers 199 of 200 losses, so that a run that exploded hides no other."""
    losses = np.concatenate([run.curves["loss"].to_numpy() for run in runs])
    losses = losses[np.isfinite(losses)]
    if not len(losses):
        return [0.0, 1.0]
    low, high = float(losses.min()), float(np.quantile(losses, 0.995))
    margin = 0.04 * max(high - low, 1e-6)
    return [low - margin, high + 2 * margin]
