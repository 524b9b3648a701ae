"""Draws any recorded name of any runs: `python -m analysis.plot --runs DIR y=loss x=step hue=KEY`.

    y=NAME      a column of metrics or timing (loss, grad_norm, zero_shot/top1, images_per_s), or
                STATISTIC/TENSOR (rms/visual.conv1.weight; the largest if TENSOR is a pattern)
    x=step      a line for each run; x=KEY of the config: a point for each run, its last value
    hue=KEY     a color for each value, and a line style for each method
    facet=KEY   a panel for each value
    band=KEY    over steps, a band over the runs that differ in the seed and that key alone
    KEY=VALUE   only the runs with that value

Without hue, a color is for a method. Names state the other settings in which runs differ. A band
goes from the smallest to the largest value around the median. Nothing is smoothed. Losses of CLIP
are compared with chance, ln(batch size). Writes OUT.png, OUT.pdf and OUT.csv, which contains the
plotted values.
"""

import argparse
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas

from analysis import cli, measures, naming, style
from analysis.cli import ChoiceError
from analysis.comparison import column_of, counted, nearest_key, short, written
from analysis.grammar import Axis, Figure, Hue, Lines, in_one_panel
from analysis.load import Runs, load_runs
from analysis.points import Points, Rows
from lowprec.nearest import nearest
from lowprec.waiting import doing

NAMES = ("y", "x", "hue", "facet", "band")  # other words select runs
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
DASHES = ("-", "--", ":", "-.")
LONGEST = 36  # characters of a line of the y axis's label
SCORES = ("zero_shot/", "retrieval/")  # whose axes are linear


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
    row, frame = make_figure(load_runs(options.runs), where=choices, **named)
    doing("drawing")
    with style.style():
        canvas = Canvas(layout="constrained")
        row.draw(frame, canvas)
        style.save(canvas, stem, plotted(frame, named))
    print(f"Wrote {stem}.png, .pdf, .csv: {counted(frame['run'].nunique(), 'run')}")
    return 0


def make_figure(
    runs: Runs,
    y: str = "loss",
    x: str = "step",
    hue: str = "",
    facet: str = "",
    band: str = "",
    where: dict[str, str] | None = None,
) -> tuple[Figure, pd.DataFrame]:
    """A figure of some runs and its frame.

    Raises ChoiceError for a name that does not exist, and if no run is left.
    """
    heads = runs.runs[runs.runs["scale"].notna()]  # a damaged config has no settings
    for key, value in (where or {}).items():
        values = heads[_key(heads, key)].map(written)
        if len(heads) and value not in set(values):
            allowed = sorted(set(values))
            hint = nearest(value, allowed)
            raise ChoiceError(f"no run has {key}={value}; there are {', '.join(allowed)}{hint}")
        heads = heads[values == value]
    if heads.empty:
        raise ChoiceError(f"no run has {', '.join(f'{k}={v}' for k, v in (where or {}).items())}")
    runs = runs.where(runs.summaries["run"].isin(heads["run"]))
    hue, facet, band = (key and _key(heads, key) for key in (hue, facet, band))
    heads = measures.named_heads(runs)
    colors = _hue(heads, hue, facet) if hue else Hue(look=_looks_of_methods(heads))
    label = "\n".join(textwrap.wrap(y, LONGEST))
    value = Axis(column=y, label=label, log=False if y.startswith(SCORES) else None)
    if x == "step":
        row = Lines(y=value, hue=colors, facet=facet, band=band)
    else:
        row = _points(runs, _key(runs.runs, x), value, colors, facet)
    frame = row.query(runs)
    if frame.empty or frame[y].isna().all():
        names = sorted({*runs.metrics, *runs.timing} - {"run", "step"})
        if y in names:
            raise ChoiceError(f"y={y}: no run has a value{runs.notes}")
        others = f"not recorded; there are {', '.join(names)}, and STATISTIC/TENSOR"
        raise ChoiceError(f"y={y}: {others}{nearest(y, [*names, *runs.statistics()])}")
    if num := len(runs) - frame["run"].nunique():
        warnings.warn(f"{num} of {counted(len(runs), 'run')} did not record {y}", stacklevel=2)
    return row, frame


def plotted(frame: pd.DataFrame, named: dict[str, str]) -> pd.DataFrame:
    """Only the plotted values: columns for the run, its name, x, y, hue and facet."""
    dotted = frame.rename(columns={short: key for key, short in measures.RENAMED.items()})
    keys = {"x": "step", "y": "loss", "hue": "label", "facet": None} | named
    keys = [_key(dotted, keys[name]) for name in ("x", "y", "hue", "facet") if keys[name]]
    return dotted[["run", *dict.fromkeys(keys)]]


def _points(runs: Runs, x: str, y: Axis, hue: Hue, facet: str) -> Points | Rows:
    """A point for each run: its last value of y, by the value of a config key in words."""
    keys = tuple(dict.fromkeys(filter(None, [x, facet, *hue.keys])))
    column, panel = (measures.RENAMED.get(key, key) for key in (x, facet))

    def last_values(runs: Runs) -> pd.DataFrame:
        heads = measures.named_heads(runs, keys)
        heads["group"] = hue.labels(heads.assign(label=heads["method"]))
        heads = heads.assign(order=[hue.order(head) for _, head in heads.iterrows()])
        heads = heads.assign(**{column: heads[column].map(written)}).sort_values("order")
        columns = [*measures.OF_A_RUN, *(measures.RENAMED.get(key, key) for key in keys)]
        columns = tuple(dict.fromkeys([*columns, "group", y.column]))
        return measures.by_run(runs, heads, columns, last)

    def last(run: Runs, head: dict) -> pd.DataFrame:
        return measures.recorded(run, y.column).dropna().tail(1)

    def facets(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
        parts = frame.groupby(panel, dropna=False)
        return [(naming.setting(facet, value), part) for value, part in parts]

    values = measures.named_heads(runs)[column]
    is_line = pd.api.types.is_numeric_dtype(values) and values.notna().all()
    places = {written(value): written(value) for value in _in_order(values)}
    shared = {"table": last_values, "values": (y,), "hue": "group", "look": hue.look}
    shared["facet"] = facets if facet else in_one_panel
    if is_line:
        axis = Axis(column=column, label=short(x), names=lambda _: places)
        return Points(x=axis, **shared)

    def blocks(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
        parts = {place: frame[frame[column] == place] for place in places}
        return [(naming.setting(x, place), part) for place, part in parts.items() if len(part)]

    return Rows(blocks=blocks, **shared)


def _hue(heads: pd.DataFrame, key: str, facet: str) -> Hue:
    """A color for each value of a config key: a scale for numbers, else distinct ones.

    The line style tells methods apart within a value of the key and a panel.
    """
    column, panel = (measures.RENAMED.get(name, name) for name in (key, facet))
    parts = [name for name in ("precision", "optimizer") if name not in (column, panel)]
    methods = list(dict.fromkeys(map(tuple, heads[parts].to_numpy())))
    values = _in_order(heads[column])
    if len(values) > 2 and all(isinstance(value, int | float | np.number) for value in values):
        colors = _scale("viridis", len(values))
    else:
        table = {} if key == "model.name" else naming.TABLES.get(key, {})  # models have no color
        colors = _distinct([table[v][-1] or "#000000" if v in table else None for v in values])
    colors = dict(zip(map(written, values), colors, strict=True))
    return Hue(
        keys=(key,),
        name=lambda head: naming.setting(key, head[column]),
        order=lambda head: list(colors).index(written(head[column])),
        look=lambda head: (
            style.paler(colors[written(head[column])], head["variant"]),
            DASHES[methods.index(tuple(head[parts])) % len(DASHES)],
        ),
    )


def _looks_of_methods(heads: pd.DataFrame) -> Callable[[pd.Series], tuple]:
    """The look of a run's method, in a color of its own where two would look alike.

    Lines are solid if all runs share one optimizer.
    """
    methods = list(heads.groupby(["precision", "optimizer"], sort=False).groups)
    several = heads["optimizer"].nunique() > 1
    dashes = {name: style.line_style(name) if several else "-" for _, name in methods}
    looks = [(style.color(*method), dashes[method[1]]) for method in methods]
    colors = [None if look in looks[:i] else look[0] for i, look in enumerate(looks)]
    colors = dict(zip(methods, _distinct(colors), strict=True))
    return lambda head: (
        style.paler(colors[head["precision"], head["optimizer"]], head["variant"]),
        dashes[head["optimizer"]],
    )


def _distinct(colors: list) -> list:
    """The colors, and in place of None others that differ from these and from each other."""
    used, num = {to_rgb(color) for color in colors if color}, colors.count(None)
    spare = [color for color in COLORS if to_rgb(color) not in used]
    spare = iter(spare if num <= len(spare) else _scale("turbo", num))
    return [color or next(spare) for color in colors]


def _scale(name: str, num: int) -> list:
    """Colors of a color map, from dark to bright."""
    return [matplotlib.colormaps[name](0.9 * i / (num - 1)) for i in range(num)]


def _key(heads: pd.DataFrame, key: str) -> str:
    """The column of a key; a config group stands for its name: `optimizer`."""
    name = column_of(key, heads)
    if name is None:
        raise ChoiceError(f"the runs have no key {key}{nearest_key(key, heads)}")
    return name


def _in_order(values: pd.Series) -> list:
    """The distinct values: none first, numbers from small to large, others as they come."""
    distinct = list(values[values.notna()].unique())
    if all(isinstance(value, int | float | np.number) for value in distinct):
        distinct = sorted(distinct)
    return [None] * bool(values.isna().any()) + distinct


if __name__ == "__main__":
    cli.run(main)
