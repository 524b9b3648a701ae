"""Figures of benchmark lines: time and time saved by size and method, and weak scaling."""

import textwrap
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.transforms import blended_transform_factory

from analysis import bench, naming, panels, paper, style
from analysis.grammar import Panels
from analysis.load import NoRunsError

METHODS = {"int8": "switchback", "fp8": "hw_fp8_switchback"}  # dtype: recipe
PAPERS = "the paper's own percentages"


def on(frame: pd.DataFrame) -> str:
    """The devices in short: `H100` for `NVIDIA H100 80GB HBM3`."""
    names = bench.devices(frame).split(", ")
    return naming.join(dict.fromkeys(name.removeprefix("NVIDIA ").split()[0] for name in names))


def with_papers(ours: pd.DataFrame, table: dict) -> pd.DataFrame:
    """Our rows, and those of a table of the paper, with the same columns."""
    shared = {"source": paper.SOURCE, "series": "int8", "file": ""}
    theirs = [
        {**shared, "tokens": tokens, "dim": dim, "value": value}
        for tokens, values in table.items()
        for dim, value in zip(paper.DIMS, values, strict=True)
    ]
    return pd.concat([ours, pd.DataFrame(theirs)], ignore_index=True)[list(ours)]


def plot_papers(frame: pd.DataFrame, ax: Axes) -> pd.DataFrame:
    """The paper's percentages: a gray band, with lines for the fewest and most tokens; our rows."""
    is_papers = frame["source"] == paper.SOURCE
    values = frame[is_papers].pivot(index="dim", columns="tokens", values="value")
    ax.fill_between(values.index, values.min(axis=1), values.max(axis=1), color="0.92", lw=0)
    for tokens in (values.columns.min(), values.columns.max()):
        label = f"paper, {tokens:,} tokens"
        ax.plot(values[tokens], color=style.OTHER, lw=0.9, ls=(0, (2, 1.2)), label=label)
    return frame[~is_papers]


def profile(lines: pd.DataFrame) -> pd.DataFrame:
    """`value`: time in % that SwitchBack's operations save."""
    saved = bench.switchback_times(lines).rename(columns={"device": "source", "dtype": "series"})
    saved["value"] = bench.saved_percent(saved["ms"], saved["base_ms"])
    ours = saved[["file", "source", "series", "tokens", "dim", "value"]]
    return with_papers(ours, paper.SAVED)


def plot_totals(frame: pd.DataFrame, ax: Axes, label: str, bar: float | None = None) -> None:
    """Percentages of SwitchBack's summed operations; fewer tokens are paler; a line at `bar`.

    The line covers the paper's widths, by which we judge.
    """
    ours = plot_papers(frame, ax)
    counts = sorted(set(ours["tokens"]), reverse=True)
    is_one = len(counts) == 1
    ax.set_title(on(frame) + f", {counts[0]:,} tokens" * is_one)
    for (series, tokens), part in ours.sort_values("dim").groupby(["series", "tokens"], sort=False):
        shade = style.paler(style.color(METHODS[series]), counts.index(tokens))
        label_of_line = naming.precision(METHODS[series]) + f", {tokens:,} tokens" * (not is_one)
        ax.plot(part["dim"], part["value"], "-o", ms=3, lw=1.2, color=shade, label=label_of_line)
    panels.number_axis(ax, frame["dim"])
    ax.set(xlabel="width of the layer", ylabel=label, ylim=(min(0, ax.get_ylim()[0]), None))
    ax.axhline(0, color="black", lw=0.6)
    if bar:
        ax.hlines(bar, paper.DIMS[0], paper.DIMS[-1], color="black", lw=0.8, ls=":")
        ax.annotate(f"our limit: {bar:g}%", (paper.DIMS[-1], bar), (0, 2), ha="right", fontsize=7,
                    textcoords="offset points")  # fmt: skip


def at_both_ends(text: str, frame: pd.DataFrame) -> str:
    """A title with our percentages at the smallest and the largest width."""
    ours = dict(iter(frame[frame["source"] != paper.SOURCE].groupby("dim")["value"]))
    (first, low), (last, high) = (
        (dim, naming.span(ours[dim], "{:.0f}")) for dim in (min(ours), max(ours))
    )
    return text.format(f"{low}%") + f" at width {first:,}, {high}% at {last:,}"


MISSING = {"s": "not measured", "rotation": 90, "color": style.OTHER, "va": "bottom"}


def end_to_end(lines: pd.DataFrame) -> pd.DataFrame:
    """The time that 8 bits save over 16 bits in the same code."""
    frame = bench.end_to_end(lines)
    if not (is_its := frame["baseline"] == "high").any():
        raise NoRunsError("no line of a recipe has one of high next to it, of the same shape")
    return frame[is_its]


def plot_bars(frame: pd.DataFrame, ax: Axes) -> None:
    """A group for each model, small to large, and in it a bar for each case.

    The paper's range is drawn behind SwitchBack int8 in ViT-H/14. Bars of models with other layers
    in 16 bits are hatched.
    """
    shapes = frame[["model", "shape"]].drop_duplicates().itertuples(index=False)
    shapes = sorted(shapes, key=lambda pair: (naming.rank(pair[0], naming.MODELS), pair[1]))
    cases = [case for case in bench.END_TO_END if case in set(frame["series"])]
    places, width = [shape for _, shape in shapes], 0.92 / len(cases)
    for place, case in enumerate(cases):
        part = frame[frame["series"] == case]
        middles = np.arange(len(places)) + (place - (len(cases) - 1) / 2) * width
        values = part.set_index("shape")["value"].reindex(places)
        name = name_of_case(case, part)
        look = {"color": style.color(case), "label": name}
        look |= {"hatch": "////", "edgecolor": "white", "lw": 0} if "layers" in name else {}
        ax.bar(middles, values, width * 0.92, **look)
        for at, value in zip(middles, values, strict=True):
            text = {"s": f"{value:.1f}"} if value == value else MISSING
            ax.text(at, max(0, np.nan_to_num(value)) + 0.5, ha="center", fontsize=6.5, **text)
        if case == "switchback":
            (low, high), label = paper.END_TO_END, f"{paper.SOURCE}: ViT-H/14, SwitchBack"
            large = middles[[model == "vit_h14" for model, _ in shapes]]
            ax.bar(large, high - low, width, low, color="0.85", zorder=0.5, label=label)
    ax.set_xticks(range(len(places)), [in_lines(shape, places) for shape in places])
    ax.grid(visible=False, axis="x")
    ax.axhline(0, color="black", lw=0.6)
    ax.margins(y=0.15)
    ax.set(ylabel=f"forward and backward time\nsaved (% of bf16's), {on(frame)}")


def most_saved(frame: pd.DataFrame) -> str:
    """The title of `end_to_end_speed`: the largest gain of a recipe over 16 bits."""
    best = frame.loc[frame["value"].idxmax()]
    model, name = naming.model(best["model"]), naming.precision(best["series"])
    return f"{name} saves up to {best['value']:.0f}% of the time, in {model}"


def name_of_case(case: str, part: pd.DataFrame) -> str:
    """A case in print, with its number of 8-bit layers if one is known and it has others, too."""
    name, counts = naming.precision(case), {*part["quantized"].dropna()}
    is_partial = len(counts) == 1 and len({*min(counts).split(" of ")}) > 1
    return f"{name}, {counts.pop()} layers" if is_partial else name


def in_lines(shape: str, shapes: list[str]) -> str:
    """A tick label: the model, its batch, and the settings that not all shapes share."""
    (model, _, first), *rest = shape.partition(" "), *(each.partition(" ") for each in shapes)
    batch, *settings = first.split(", ")
    own = [each for each in settings if any(each not in more.split(", ") for *_, more in rest)]
    return "\n".join([naming.model(model), batch, *own])


OF_RECIPES = ("fp8_blockwise", "mxfp8", "nvfp4_rht_sr", "nvfp4", "mxfp4")
NOISE = {  # case: name in print, and color
    "int8": ("int8", style.color("switchback")),
    "e4m3": ("fp8, both e4m3", style.color("fp8_switchback")),
    "e5m2 e4m3": ("fp8, e5m2 and e4m3", style.color("hw_fp8_switchback")),
    **{name: (naming.precision(name), style.color(name)) for name in OF_RECIPES},
}
VIT_H = {  # terms that ViT-H/14's products sum: widths; 256 images, 128 patches and a token
    "ViT-H/14: output,\ninput gradient": (1280, 5120),
    "weight\ngradient": (33024, 33024),
}


def variance(lines: pd.DataFrame) -> pd.DataFrame:
    """One row per case and inner dimension, from the newest file that has it: what is plotted."""
    frame = bench.newest(lines[lines["case"].isin(NOISE)], ["case", "inner_dim"])
    order = frame["case"].map(list(NOISE).index)
    frame = frame.assign(order=order).sort_values(["order", "inner_dim"])
    columns = ["case", "inner_dim", "measured", "predicted", "ratio", "file"]
    return frame[columns].reset_index(drop=True)


def plot_variance(frame: pd.DataFrame, ax: Axes) -> None:
    """Both axes logarithmic: points measured, lines predicted, ViT-H's sums marked.

    Dotted lines join the points of cases without a prediction, which have scales of blocks. Points
    of later cases are smaller, so that none hides another.
    """
    above = blended_transform_factory(ax.transData, ax.transAxes)
    for name, (first, last) in VIT_H.items():
        ax.axvspan(first / 1.04, last * 1.04, color="#DDDDDD", lw=0, zorder=0.5)
        middle = (first * last) ** 0.5
        ax.text(middle, 1.02, name, transform=above, ha="center", va="bottom", fontsize=6.5)
    for i, (case, part) in enumerate(frame.groupby("case", sort=False)):
        label, shade = NOISE[case]
        look = {"color": shade}
        if is_predicted := part["predicted"].notna().any():
            ax.plot(part["inner_dim"], part["predicted"], lw=1, label=label, **look)
        look |= {"ls": "none"} if is_predicted else {"ls": ":", "lw": 0.7, "label": label}
        ax.plot(part["inner_dim"], part["measured"], marker="o", ms=5 - 0.4 * i, **look)
    ax.set(xscale="log", yscale="log", xlabel="terms of the dot product",
           ylabel="variance of the error\n(of the operands: 1)")  # fmt: skip
    ax.text(0.02, 0.96, "dotted: scales of blocks", transform=ax.transAxes, va="top", fontsize=7)
    ax.minorticks_off()


def most_precise(frame: pd.DataFrame) -> str:
    """The title of `quantization_variance`, at the largest inner dimension."""
    longest = frame[frame["inner_dim"] == frame["inner_dim"].max()].set_index("case")["measured"]
    return f"On normal numbers, {NOISE[longest.idxmin()][0]} has the smallest error"


KINDS = {"ddp": ("DDP", "-", "o"), "fsdp2": ("FSDP2", "--", "s")}  # in print, line, marker


def by_setting(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """A panel for each model, optimizer, device, batch and further settings."""
    keys = ["model", "optimizer", "source", "batch", "settings"]
    order = frame["model"].map(naming.order("model.name"))
    parts = frame.assign(order=order).sort_values("order", kind="stable")
    titled = []
    for (model, optimizer, _, batch, settings), part in parts.groupby(keys, sort=False):
        named = f"{naming.model(model)}, {naming.optimizer_name(optimizer)}, {on(part)}"
        # a setting stays on its line
        rest = f"{int(batch):,} images per GPU{settings}".replace(" ", "\xa0")
        titled.append((f"{named}\n" + textwrap.fill(rest.replace(",\xa0", ", "), 30), part))
    return titled


def plot_scaling(frame: pd.DataFrame, ax: Axes) -> None:
    """A line for each precision with DDP or FSDP2, from one GPU on; points are earlier runs."""
    order = frame["precision"].map(naming.order("precision.label"))
    parts = frame.assign(order=order).sort_values(["order", "kind", "processes"])
    for (precision, kind), part in parts.groupby(["precision", "kind"], sort=False):
        name, dashes, marker = KINDS[kind]
        runs = part.groupby(["file", "host", "commit"], dropna=False, sort=False)
        *earlier, last = (run for _, run in runs)  # in the order of lines
        look = {"color": style.color(precision), "marker": marker, "ms": 4}
        for run in earlier:
            ax.plot(run["processes"], run["ratio"], ls="none", mfc="white", zorder=3, **look)
        look |= {"lw": 1.2, "ls": dashes, "label": f"{naming.precision(precision)}, {name}"}
        ax.plot(last["processes"], last["ratio"], zorder=4, **look)
    ax.axhline(1, color="black", lw=0.8, ls=":")
    ax.annotate("perfect scaling", (1, 1), (0, 1.5), xycoords=ax.get_yaxis_transform(), ha="right",
                fontsize=6.5, textcoords="offset points")  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}")
    low, high = frame["ratio"].agg(["min", "max"])
    ax.set(xlabel="GPUs of one host", ylim=(min(0.8, low - 0.02), high + 0.02))
    panels.name_values(ax, "images/s per GPU, relative\nto one GPU", "y")


def slowest_and_fastest(frame: pd.DataFrame) -> str:
    """The title of `weak_scaling`, at the largest number of GPUs."""
    most = frame["processes"].max()
    shares = naming.span(100 * frame.loc[frame["processes"] == most, "ratio"], "{:.0f}")
    return f"Each of {most} GPUs trains at {shares}% of the speed of one GPU alone"


FIGURES = {
    "op_profile": Panels(
        title=partial(at_both_ends, "Layers in 8 bits save {} of the time of 16 bits"),
        lines="ops",
        table=profile,
        plots=(partial(plot_totals, label="time saved (% of 16 bits)"),),
        size=(1.5, 2.5),
        text="Operations of one linear layer, mean of dim to 4 dim and 4 dim to dim: time that "
        "SwitchBack's operations save compared with the three 16-bit products (bf16); gray: "
        f"{PAPERS} on an A100 in fp16. After figure 3 (right), arXiv:2304.13013.",
    ),
    "quantize_share": Panels(
        title=partial(at_both_ends, "Quantizing takes {} of SwitchBack's time"),
        lines="ops",
        table=lambda lines: with_papers(bench.quantize_shares(lines), paper.QUANTIZE_SHARE),
        plots=(
            partial(
                plot_totals,
                label="share of SwitchBack's time\nspent on quantizing (%)",
                bar=paper.LARGEST_TIMED_SHARE,
            ),
        ),
        size=(1.5, 2.5),
        text=f"Share of SwitchBack's time spent on quantizing x, g and w; gray: {PAPERS} on an "
        "A100 in fp16. After figure 4 (left), arXiv:2304.13013.",
    ),
    "end_to_end_speed": Panels(
        title=most_saved,
        lines="model",
        table=end_to_end,
        plots=(plot_bars,),
        size=(1.4, 2.5),
        text="Forward and backward of the whole model: time saved compared with nn.Linear in bf16 "
        "in the same code, timed in the same run. Gray: the paper's own range for training "
        "ViT-H/14 with SwitchBack on A100s in fp16, {:g} to {:g}%. After figure 4 (right), "
        "arXiv:2304.13013."
        .format(*paper.END_TO_END),
    ),
    "weak_scaling": Panels(
        title=slowest_and_fastest,
        lines=bench.SCALING,
        table=bench.weak_scaling,
        plots=(plot_scaling,),
        facet=by_setting,
        text="Training steps on GPUs of one host with the same number of images per GPU: images "
        "per second and GPU, relative to one GPU of the same host in the same run. Hollow: "
        "earlier runs.",
    ),
    "quantization_variance": Panels(
        title=most_precise,
        lines="quantization_variance",
        table=variance,
        plots=(plot_variance,),
        size=(1.5, 2.5),
        text="Variance of the error of dot products of quantized standard normal numbers. Int8 and "
        "fp8 have SwitchBack's granularities (one scale per row, one for the other operand), the "
        "others those of their recipes' weight gradients. Points: measured; solid lines: "
        "predicted, K (E[x^2] e_w + E[w^2] e_x + e_x e_w) with e = E[step^2] / 12, where step is "
        "the distance between neighboring numbers. Gray: the sums of ViT-H/14's products: 1,280 "
        "to 5,120 features, and for the weight gradient 33,024 tokens (256 images per GPU, half "
        "of the patches dropped). After appendix C, arXiv:2304.13013.",
    ),
}  # fmt: skip
