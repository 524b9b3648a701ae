"""Memory by recipe: what a linear layer saves for backward, and the peak of a whole model.

Lines: `python -m experiments.benchmarks layer` and, on a GPU,
`python -m experiments.benchmarks model`, with and without checkpointing.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import bench, style
from analysis.figures.end_to_end_speed import CASES, bars, with_settings
from analysis.load import NoRunsError

LINES = "layer_memory model"
PANELS = {  # panel: (label of its axis, format of the number over a bar)
    "layer": ("saved for backward (of nn.Linear's)", "%.2f"),
    "model": ("peak of forward + backward (GiB)", "%.1f"),
}
NEEDED = ["direction", "dim", "tokens", "ratio", "memory_gib", "saved_mib", "peak_mib"]
COLUMNS = ["file", "source", "panel", "group", "series", "tokens", "saved_mib", "peak_mib", "value"]


def query(lines: pd.DataFrame) -> pd.DataFrame:
    """One row per bar: `value` is a share of nn.Linear's saved bytes, or the GiB of a model.

    `group` is the layer or model; each comes whole from the newest file that has it. If a file has
    a case twice, the last counts. Raises NoRunsError if no line holds a number.
    """
    absent = [column for column in NEEDED if column not in lines]  # lines of one kind alone
    known = lines.reindex(columns=[*lines.columns, *absent])
    known = known[known["case"].isin(CASES)]
    layers = known[(known["slug"] == "layer_memory") & (known["direction"] == "both")]
    layers = bench.newest(layers, ["tokens", "dim"]).sort_values(["tokens", "dim"])
    models = with_settings(known[(known["slug"] == "model") & known["memory_gib"].notna()])
    order = [style.rank(shape.split()[0], style.MODELS) for shape in models["shape"]]
    models = bench.newest(models.assign(order=order), ["shape"]).sort_values(["order", "shape"])
    many = layers["tokens"].nunique() > 1
    names = [
        f"{row.dim:.0f}" + (f"\n{row.tokens:,.0f} tokens" if many else "")
        for row in layers.itertuples()
    ]
    layers = layers.assign(panel="layer", group=names, value=layers["ratio"])
    models = models.assign(panel="model", group=models["shape"], value=models["memory_gib"])
    rows = pd.concat([layers, models], ignore_index=True)
    if rows.empty:
        raise NoRunsError(f"no line of {LINES} holds memory; a model's is measured on a GPU alone")
    rows = rows.rename(columns={"device": "source", "case": "series"})[COLUMNS]
    return rows.drop_duplicates(["panel", "group", "series"], keep="last", ignore_index=True)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel: a group of bars for each layer or model, a bar for each case."""
    name, number = PANELS[frame["panel"].iloc[0]]
    label = {"fmt": number, "fontsize": 5.5, "padding": 1.5, "rotation": 90}
    bars(frame, ax, list(frame["group"].unique()), CASES, 0.86, **label)
    ax.margins(x=0.02, y=0.12)
    ax.set(ylabel=name)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws layers on the left and models on the right above one legend."""
    panels = [panel for panel in PANELS if panel in set(frame["panel"])]
    figure.set_size_inches(style.COLUMN_WIDTH * (2.1 if len(panels) > 1 else 1.4), 3.4)
    shares = [len(frame[frame["panel"] == panel]) for panel in panels]  # bars: equally wide
    axes = figure.subplots(1, len(panels), squeeze=False, width_ratios=shares)[0]
    for panel, ax in zip(panels, axes, strict=True):
        plot(frame[frame["panel"] == panel], ax)
        if panel == "layer":
            ax.axhline(1, color="black", lw=0.6)
            ax.set(xlabel="dim")
    bench.legend_below(figure, list(axes)[::-1], ncols=4)


def caption(frame: pd.DataFrame) -> str:
    """Names the device and what is counted."""
    layers, models = (frame[frame["panel"] == panel] for panel in PANELS)
    text = f"Memory on {bench.devices(frame)}."
    if not layers.empty:
        counts = " and ".join(f"{tokens:,.0f}" for tokens in layers["tokens"].unique())
        text += (
            " What the forward of a linear layer keeps for backward, of nn.Linear's: dim to 4 dim "
            f"and 4 dim to dim together, {counts} tokens, all in bf16; weights are not counted, "
            "8-bit copies of them are."
        )
    if not models.empty:
        text += (
            " The most that forward and backward of a whole model take, parameters and gradients "
            "included, an optimizer not."
        )
    return text
