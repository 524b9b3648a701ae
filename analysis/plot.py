"""Draws any recorded name of any runs: `python -m analysis.plot --runs DIR y=loss x=step hue=KEY`.

    y=NAME      a column of metrics or timing (loss, grad_norm, zero_shot/top1, images_per_s), or
                STATISTIC/TENSOR (rms/visual.conv1.weight; the largest if TENSOR is a pattern)
    x=step      a line for each run; x=KEY of the config: the last value of each run
    hue=KEY     a color for each value;  facet=KEY  a panel for each value
    band=KEY    runs that differ in it alone share a color (seed, unless another key is given)
    KEY=VALUE   only the runs with that value

Over steps, each run is a thin line, and several runs of one color share a thick median line.
Nothing is smoothed. Otherwise each run is a point, with the mean and the range of each color.
Losses of CLIP are compared with chance, ln(batch size). Writes OUT.png, OUT.pdf and
OUT.csv, which contains the plotted values.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import cli, curves, style
from analysis.cli import ChoiceError
from analysis.comparison import counted, short, signature, written
from analysis.load import Runs, load_runs
from lowprec.nearest import nearest

TABLES = {  # keys whose values have printed names, the first, and colors, the last
    "precision.label": style.PRECISIONS,
    "optimizer.name": style.OPTIMIZERS,
    "intervention.name": style.INTERVENTIONS,
}
NAMES = ("y", "x", "hue", "facet", "band")  # other words select runs
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
WIDE = 30  # ratio of the largest to the smallest value on a logarithmic axis
MOST_UPRIGHT = 9  # characters of a tick label; longer ones are turned
SCORES = ("zero_shot/", "retrieval/")  # whose axes are linear
NULL = "null"  # the value of a key that has none


@cli.entry
def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = cli.Parser(
        prog="python -m analysis.plot",
        description=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", required=True, help="folder of runs, or its URL")
    parser.add_argument("--out", type=Path, default=Path("figures/plot"), help="[figures/plot]")
    parser.add_argument("words", nargs="*", metavar="KEY=VALUE", help="what to draw")
    options = parser.parse_intermixed_args(arguments)
    wrong = [word for word in options.words if not word.partition("=")[2]]
    if wrong:
        raise ChoiceError(f"{wrong[0]!r}: KEY=VALUE is expected, such as y=loss")
    choices = dict(word.split("=", 1) for word in options.words)
    named = {name: choices.pop(name) for name in NAMES if name in choices}
    is_file = options.out.suffix in (".png", ".pdf", ".csv")
    stem = options.out.with_suffix("") if is_file else options.out
    stem.parent.mkdir(parents=True, exist_ok=True)
    frame = query(load_runs(options.runs), **named, where=choices)
    with style.style():
        figure = Figure(layout="constrained")
        draw(frame, figure)
        style.save(figure, stem, plotted(frame))
    print(f"Wrote {stem}.png, .pdf, .csv: {counted(frame['run'].nunique(), 'run')}")
    return 0


def query(
    runs: Runs,
    y: str = "loss",
    x: str = "step",
    hue: str | None = None,
    facet: str | None = None,
    band: str = "seed",
    where: dict[str, str] | None = None,
) -> pd.DataFrame:
    """One row per point: run, step, x, y, hue, facet, the names of these four, state, batch_size.

    `group` is equal for runs that differ in `band` alone. Without `hue`, colors are for methods
    and the settings in which runs differ. Raises ChoiceError for a name that does not exist.
    """
    heads = runs.runs[runs.runs["scale"].notna()]  # a damaged config has no settings
    for key, value in (where or {}).items():
        heads = heads[_column(heads, key).map(written) == value]
    if heads.empty:
        raise ChoiceError(f"no run has {', '.join(f'{k}={v}' for k, v in (where or {}).items())}")
    values = recorded(runs.where(runs.summaries["run"].isin(heads["run"])), y)
    if hue is None:
        by_key = [key for key in (facet, band, x) if key not in (None, "step", "seed")]
        split_by = [_column(heads, key).name for key in by_key]
        split_by = [name for name in split_by if name != "model.name"]  # names leave it out
        groups = heads.groupby(split_by, dropna=False) if split_by else [((), heads)]
        heads = pd.concat([curves.name_methods(group) for _, group in groups]).loc[heads.index]
        hue = "method" if heads["method"].nunique() > 1 else None
    keys = {"hue": hue, "facet": facet, **({} if x == "step" else {"x": x})}
    settings = pd.DataFrame({"run": heads["run"], "state": heads["state"]})
    varied = [_column(heads, key).name for key in (band, band if x == "step" else x)]
    settings["group"] = signature(heads, *varied, seed=band != "seed")
    settings["batch_size"] = heads["batch_size"]
    for name, key in keys.items():
        settings[name] = _column(heads, key) if key else ""
    frame = values.merge(settings, on="run")
    if x == "step":
        frame = frame.assign(x=frame["step"])
    else:
        frame = frame.dropna(subset="y").groupby("run", sort=False).tail(1)
    if frame.empty:
        raise ChoiceError(f"{y} is not recorded in these runs")
    names = {f"{name}_name": _column(heads, key).name if key else "" for name, key in keys.items()}
    return frame.assign(y_name=y, **{"x_name": x} | names)


def plotted(frame: pd.DataFrame) -> pd.DataFrame:
    """Only the plotted values: one column each for run, x, y, hue and facet, by name."""
    names = {name: frame[f"{name}_name"].iloc[0] for name in ("x", "y", "hue", "facet")}
    values = frame[["run", *filter(names.get, names)]].rename(columns=names)
    return values.loc[:, ~values.columns.duplicated()]


def recorded(runs: Runs, name: str) -> pd.DataFrame:
    """Columns run, step and y, in order of steps: the recorded values of a name."""
    for table in (runs.metrics, runs.timing):
        if name in table and name not in ("run", "step"):
            y = pd.to_numeric(table[name], errors="coerce")
            return table[["run", "step"]].assign(y=y).dropna(subset="y" if "/" in name else "step")
    statistic, _, tensor = name.partition("/")
    try:
        table = runs.tensors(tensor or "*", statistic)
    except LookupError as error:
        names = sorted({*runs.metrics, *runs.timing} - {"run", "step"})
        others = f"not recorded; there are {', '.join(names)}, and STATISTIC/TENSOR"
        reason = error if tensor else others
        raise ChoiceError(f"y={name}: {reason}{nearest(name, names)}") from None
    y = table.drop(columns=["run", "step"]).max(axis=1)
    return table[["run", "step"]].assign(y=y).drop_duplicates(["run", "step"], keep="last")


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a panel for each facet, with axes that can be compared."""
    facets = _in_order(frame["facet"])
    colors = _colors(frame["hue"], frame["hue_name"].iloc[0])
    columns = curves.num_columns(len(facets))
    rows = -(-len(facets) // columns)
    figure.set_size_inches(1.3 * style.COLUMN_WIDTH * columns, 2.7 * rows + 0.5)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    ends = [] if frame["x_name"].iloc[0] == "step" else _in_order(frame["x"])
    for ax, facet in zip(axes.flat, facets, strict=False):
        plot(frame[frame["facet"] == facet], ax, colors, ends)
    for i, ax in enumerate(axes.flat):
        if i >= len(facets):
            ax.remove()
            continue
        if not frame["y_name"].iloc[0].startswith(SCORES) and _is_wide(frame["y"]):
            style.log_axis(ax)
        if frame["y_name"].iloc[0] == "loss":
            curves.draw_chance(ax, frame["batch_size"])
        ax.label_outer()
    if len(colors) > 1:
        handles = [matplotlib.lines.Line2D([], [], color=color) for color in colors.values()]
        labels = [_printed(frame["hue_name"].iloc[0], value) for value in colors]
        title = short(frame["hue_name"].iloc[0])
        figure.legend(handles, labels, title=title, loc="outside right upper")


def plot(frame: pd.DataFrame, ax: Axes, colors: dict, ends: list) -> Axes:
    """One panel: a line for each run and their median, or points with their mean and range.

    `ends` are the values of x, which stand at equal distances; there are none if x is the step.
    """
    head = frame.iloc[0]
    for (hue, _), part in frame.groupby(["hue", "group"], sort=False):
        if ends:
            _plot_ends(part.assign(x=part["x"].map(ends.index)), ax, colors[hue])
        else:
            _plot_lines(part, ax, colors[hue])
    facet = f"{short(head['facet_name'])} = {_printed(head['facet_name'], head['facet'])}"
    ax.set(xlabel=head["x_name"], ylabel=head["y_name"], title=facet if head["facet_name"] else "")
    if ends:
        names = [_printed(head["x_name"], value) for value in ends]
        turned = {"rotation": 25, "ha": "right"} if max(map(len, names)) > MOST_UPRIGHT else {}
        ax.set_xticks(range(len(ends)), names, **turned)
        ax.set_xlim(-0.3, len(ends) - 0.7)
    else:
        curves.step_axis(ax)
    return ax


def _plot_lines(part: pd.DataFrame, ax: Axes, color: tuple) -> None:
    lines = part.pivot(index="step", columns="run", values="y")
    several = len(lines.columns) > 1
    for run in lines:
        line = lines[run].dropna()
        width, alpha = (0.5, 0.5) if several else (0.9, 1)
        ax.plot(line.index, line, color=color, lw=width, alpha=alpha)
        finite = line[np.isfinite(line)]
        if (part.loc[part["run"] == run, "state"] == "diverged").any() and len(finite):
            ax.plot(finite.index[-1], finite.iloc[-1], "X", color=color, ms=5, mec="white", mew=0.6)
    if several:
        median = lines.median(axis=1)
        ax.plot(median.index, median, color=color, lw=1.2)


def _plot_ends(part: pd.DataFrame, ax: Axes, color: tuple) -> None:
    ends = part.groupby("x", sort=True)["y"].agg(["mean", "min", "max"])
    ax.plot(ends.index, ends["mean"], color=color)
    ax.plot(part["x"], part["y"], "o", color=color, ms=3, alpha=0.7, mew=0)
    if (ends["min"] < ends["max"]).any():
        ax.fill_between(ends.index, ends["min"], ends["max"], color=color, alpha=0.15, lw=0)


def _column(heads: pd.DataFrame, key: str) -> pd.Series:
    """A column of `Runs.runs`, NULL if missing; a config group stands for its name: `optimizer`."""
    name = next((n for n in (key, f"{key}.name", f"{key}.label") if n in heads), None)
    if name is None:
        raise ChoiceError(f"the runs have no key {key}{nearest(key, heads.columns)}")
    values = heads[name]
    return values.astype(object).where(values.notna(), NULL) if values.isna().any() else values


def _in_order(values: Iterable) -> list:
    """The distinct values: numbers sorted after NULL, others in the order of the runs."""
    distinct = list(dict.fromkeys(values))
    numbers = [value for value in distinct if value != NULL]
    if not all(isinstance(value, int | float | np.number) for value in numbers):
        return distinct
    return [NULL] * (len(numbers) < len(distinct)) + sorted(numbers)


def _colors(values: pd.Series, key: str) -> dict:
    """The color of each value: a scale for numbers, else distinct ones."""
    distinct = _in_order(values)
    if len(distinct) > 2 and all(isinstance(value, int | float | np.number) for value in distinct):
        scale = matplotlib.colormaps["viridis"]
        return {v: scale(0.9 * i / (len(distinct) - 1)) for i, v in enumerate(distinct)}
    own = {value: entry[-1] or "#000000" for value, entry in TABLES.get(key, {}).items()}
    return {v: own.get(v, COLORS[i % len(COLORS)]) for i, v in enumerate(distinct)}


def _printed(key: str, value: object) -> str:
    if key == "model.name":
        return style.model(value)
    return TABLES.get(key, {}).get(value, (written(value),))[0]


def _is_wide(values: pd.Series) -> bool:
    """Whether values need a logarithmic axis."""
    if not pd.api.types.is_numeric_dtype(values):
        return False
    finite = values[np.isfinite(values)]
    return len(finite) > 0 and finite.min() > 0 and finite.max() > WIDE * finite.min()


if __name__ == "__main__":
    cli.run(main)
