"""Figures of what blocks and layers recorded: features, gradients and their noise."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from analysis import comparison, measures, naming, panels, paper, run_files, style
from analysis.figures.scores import largest_features, weight_gradient
from analysis.grammar import ANYTHING, Axis, Panels, by, by_model
from analysis.load import NoRunsError, Runs
from analysis.points import Rows
from analysis.run_files import as_path

DASHES = {"first": (0, (1.2, 1.0)), "last": "-"}


def plot_magnitudes(frame: pd.DataFrame, ax: Axes) -> None:
    """One model: magnitude by depth, dotted early and solid late in training."""
    for (_, at), line in frame.groupby(["run", "at"], sort=False):
        head = line.iloc[0]
        label = f"{head['label']}, step {head['step']:,}"
        shade = naming.INTERVENTIONS.get(head["intervention"], ("", style.OTHER))[1]
        mean = line["feature_mean"].where(np.isfinite(line["feature_mean"]))
        ax.plot(line["block"], mean, color=style.paler(shade, head["variant"]), ls=DASHES[at],
                marker="o", ms=2.5, label=label)  # fmt: skip
    ax.set(
        xlabel="block of the vision tower",
        ylabel="mean absolute value of a\nblock's output (log scale)",
    )
    style.log_axis(ax)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def ends_of_features(frame: pd.DataFrame) -> str:
    """The title of `feature_magnitude`: the last block at the last step, by intervention."""
    last = frame[(frame["at"] == "last") & (frame["block"] == frame["vision_layers"] - 1)]
    means = last.groupby("intervention")["feature_mean"].mean()
    if frame["model"].nunique() > 1 or set(means.index) != {"none", "zero_init"}:
        return ""
    none, zero_init = means["none"], means["zero_init"]
    return f"The last block's features end at {none:.2g}, with zero-init at {zero_init:.2g}"


SIZE_STUDIES = ("accuracy_vs_size", "weight_gradient", "one_product", "formats", "rounding")
BF16, ROUNDING = "bf16", "bf16, other rounding"
EARLY = 0.1  # of the steps: the early record
GRADIENTS = {"int8": "int8 weight gradient", "e2m1": "e2m1 weight gradient",
             "e4m3": "fp8 weight gradient", "e5m2": "fp8 weight gradient",
             "": "16-bit weight gradient"}  # by format, in print  # fmt: skip


def beside_bf16(heads: pd.DataFrame) -> pd.DataFrame:
    """The runs whose settings, but for the recipe, are those of a bf16 run of the first study.

    Runs that agree in every setting and the seed, such as those of two studies, count once.
    """
    heads = heads.dropna(subset="scale")
    is_own, settings = heads["experiment"] == SIZE_STUDIES[0], _settings(heads)
    is_paired = settings.isin(settings[is_own & (heads["precision.label"] == BF16)])
    once = comparison.distinct(pd.concat([heads[is_paired & is_own], heads[is_paired & ~is_own]]))
    return heads[heads["run"].isin(once["run"])]


def _settings(heads: pd.DataFrame) -> pd.Series:
    """For each run a text, equal if runs differ only in recipe and last digits of the rate."""
    rates = heads["optimizer.lr"].map("{:.6g}".format)
    return comparison.signature(heads.assign(**{"optimizer.lr": rates}), "precision.label")


def sizes(runs: Runs) -> pd.DataFrame:
    """One row per run at the last record, and at the last of the first tenth of the steps (`at`).

    `ratio` is `feature_mean` divided by that of the bf16 run with the same seed at the same step;
    an end at another step has no row. NoRunsError if no run has a recipe and a bf16 run.
    """
    is_bf16 = (runs.runs["precision.label"] == BF16) & (runs.runs["experiment"] != "rounding")
    if is_bf16.all():
        text = "no run agrees in all but its recipe with a bf16 run of experiment="
        raise NoRunsError(f"{runs.root}: {text}{SIZE_STUDIES[0]}")
    heads = measures.named_heads(runs)
    recipes = measures.with_recipe(heads)["recipe"]
    gradients = recipes.map(weight_gradient).map(GRADIENTS)
    for column, names in (("recipe", recipes.map(naming.precision)), ("gradient", gradients)):
        heads[column] = names.where(heads["experiment"] != "rounding", ROUNDING)
    columns = (*measures.OF_A_RUN, "recipe", "gradient", "at", "step", "feature_mean", "ratio")
    frame = measures.by_run(runs, heads, columns, _sizes)
    settings = frame["run"].map(_settings(runs.runs).set_axis(runs.runs["run"]))
    keys = (settings, frame["at"], frame["step"])
    bases = measures.of_bf16(frame["feature_mean"], frame["recipe"], *keys)
    frame["ratio"] = frame["feature_mean"] / bases
    return frame[frame["ratio"].notna()].reset_index(drop=True)


def _sizes(run: Runs, head: dict) -> pd.DataFrame:
    ends = {"last": 1, "early": EARLY}
    records = [measures.last_size(run, head, share).assign(at=at) for at, share in ends.items()]
    return pd.concat(records).rename(columns={"size": "feature_mean"})


def ends(frame: pd.DataFrame) -> pd.DataFrame:
    """The last records of other runs than the first study's in bf16."""
    return frame[(frame["at"] == "last") & (frame["recipe"] != naming.precision(BF16))]


def by_gradient(frame: pd.DataFrame) -> str:
    """The title of `feature_size`."""
    means = ends(frame).groupby(["gradient", "model"])["ratio"].mean()
    return largest_features(means, means.index.get_level_values(0) == GRADIENTS["int8"])


TENSOR = paper.BLOCK + ".mlp.c_proj.weight"
ENDS = {0: " (first)", 1: " (last)"}  # share of the depth: in print
BELOW = 0.001  # share of the gradients, the smallest, that the axes leave out


def gradients(runs: Runs) -> pd.DataFrame:
    """One row per recorded step and block: exactly what is plotted."""
    columns = (*measures.OF_A_RUN, "block", "step", "gradient", "gradient_smoothed")
    return measures.by_run(runs, measures.by_intervention(runs), columns, _gradients)


def _gradients(run: Runs, head: dict) -> pd.DataFrame:
    depth = 1 if pd.isna(head["vision_layers"]) else int(head["vision_layers"])  # 1 if unknown
    parts = []
    for block in sorted({block * depth // paper.DEPTH for block in paper.BLOCKS}):
        values = run.series(TENSOR.format(block), "grad_norm")
        values = values.where(np.isfinite(values) & (values > 0))
        smoothed = style.smooth(values)
        part = pd.DataFrame({"gradient": values, "gradient_smoothed": smoothed})
        parts.append(part.reset_index().assign(block=block))
    return pd.concat(parts)


def plot_gradients(frame: pd.DataFrame, ax: Axes) -> None:
    """The runs of one label: lines by block, the first and the last in color."""
    head = frame.iloc[0]
    for (_, block), line in frame.groupby(["run", "block"]):
        depth = block / max(1, head["vision_layers"] - 1)
        label = f"block {block}{ENDS.get(depth, '')}"
        look = {"color": style.setting_color(depth, 1)}
        ax.plot(line["step"], line["gradient"], alpha=0.12, lw=0.5, rasterized=True, **look)
        ax.plot(line["step"], line["gradient_smoothed"], lw=1, label=label, **look)
    lowest, highest = frame["gradient"].quantile([BELOW, 1])
    ax.set(
        yscale="log", xlim=(0, head["num_steps"]), ylabel="gradient norm of an\nMLP's output layer"
    )
    ax.set_ylim(0.8 * lowest, 1.25 * highest)
    ax.minorticks_off()
    panels.step_axis(ax)


def ratios_of_ends(frame: pd.DataFrame) -> str:
    """The title of `gradient_magnitude`: the first block's gradient by the last one's, at the end.

    Means over the last tenth of the steps.
    """
    late = frame[frame["step"] > 0.9 * frame["num_steps"]]
    means = late.groupby(["intervention", "run", "block"])["gradient"].mean()
    ends = means.groupby(level=[0, 1]).agg(["first", "last"])
    spans = (ends["first"] / ends["last"]).groupby(level=0).agg(naming.span, "{:.2g}")
    if set(spans.index) != {"none", "zero_init"}:
        return ""
    return (
        f"The first block's gradient ends {spans['none']} times the last block's, with zero-init "
        f"{spans['zero_init']} times"
    )


PRODUCT, OPERAND = "grad_weight", "g"
COMPARED = ("llm_int8", "fp8_tensorwise")  # with bands
VISION, TEXT = "vision tower", "text tower"


def noises(runs: Runs) -> pd.DataFrame:
    """One row per step, recipe and layer whose weight gradient the recipe quantizes.

    `terms`: number of tokens in the sum, the largest that was measured; `sqnr_db` of the product;
    `underflowed`: share of the non-zero elements of g that become 0. NoRunsError without rows.
    """
    facts = ("tower", "step", "recipe", "layer", "terms", "sqnr_db", "underflowed")
    columns = (*measures.OF_A_RUN, *facts)
    heads = measures.named_heads(runs) if len(runs) else pd.DataFrame()
    frame = measures.by_run(runs, heads, columns, _noises)
    if frame.empty:
        raise NoRunsError("no quantization errors: python -m experiments.quant_error run=RUN")
    return frame


def _noises(run: Runs, head: dict) -> pd.DataFrame:
    rows, _ = run_files.read_row_file(run.summaries.iloc[0].to_dict(), "quant_error")
    table = pd.DataFrame(rows)
    if table.empty:
        return table
    table = table[(table["product"] == PRODUCT) & (table["operand"] == OPERAND)]
    most = table.groupby("layer")["inner_dim"].transform("max")
    table = table[(table["format"] != "bf16") & (table["inner_dim"] == most)]
    table = table.rename(columns={"inner_dim": "terms"}).drop(columns="sqnr_db")
    table["tower"] = np.where(table["layer"].str.startswith("visual"), VISION, TEXT)
    return table.rename(columns={"product_sqnr_db": "sqnr_db"}).astype({"sqnr_db": float})


def plot_noises(frame: pd.DataFrame, ax: Axes, value: str = "sqnr_db", fp8: str = "") -> None:
    """One tower: the median over layers by step, and the middle half of those of COMPARED.

    `fp8` is the name of all fp8 formats; without it, each has its own.
    """
    recipes = sorted(frame["recipe"].unique(), key=naming.order("precision.label"))
    for recipe in recipes:
        by_step = frame[frame["recipe"] == recipe].groupby("step")[value]
        low, middle, high = (by_step.quantile(q) for q in (0.25, 0.5, 0.75))
        color = style.color(recipe)
        if recipe in COMPARED:
            ax.fill_between(middle.index, low, high, alpha=0.2, lw=0, color=color)
        name = fp8 if fp8 and "fp8" in recipe else naming.precision(recipe)
        ax.plot(middle.index, middle, "-o", ms=2.5, color=color, label=name)
    ax.set_ylabel("signal to noise of the weight\ngradient (dB), higher is better")
    panels.step_axis(ax)


def most_zeros(frame: pd.DataFrame) -> str:
    """The title of `layer_noise`: the share of elements of g that int8 and fp8 turn into 0."""
    last = frame[frame["step"] == frame["step"].max()]
    zeros = last.groupby(["recipe", "tower"])["underflowed"].median()
    if not set(COMPARED) <= set(zeros.index.unique(0)):
        return ""
    int8, fp8 = (naming.span(zeros[recipe], "{:.0%}") for recipe in COMPARED)
    return f"At the end, LLM.int8() turns {int8} of the output gradient into 0, fp8 {fp8}"


def plot_zeros(frame: pd.DataFrame, ax: Axes) -> None:
    """One tower: the elements of g that become 0."""
    plot_noises(frame, ax, "underflowed", fp8="all fp8 formats")
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    ax.set(ylim=(0, None), ylabel="elements of the output\ngradient that become 0")


FIGURES = {
    "feature_magnitude": Panels(
        studies=("feature_magnitude",),
        table=lambda runs: measures.first_and_last_features(runs, measures.by_intervention(runs)),
        plots=(plot_magnitudes,),
        facet=by_model,
        title=ends_of_features,
        shows=measures.comparing("intervention"),
        what="mean magnitude of the output of each block of the vision tower",
        text="Dotted: the first record; solid: the last. After figure 5 (right), arXiv:2304.13013, "
        "which begins at initialization.",
    ),
    "feature_size": Rows(
        studies=SIZE_STUDIES,
        same_but=ANYTHING,
        where=beside_bf16,
        table=sizes,
        values=(
            Axis(
                column="ratio",
                label="mean absolute value of the last vision block's\noutput, relative to bf16",
                log=True,
                reference=1,
                where=ends,
            ),
        ),
        hue="gradient",
        order=(*GRADIENTS.values(), ROUNDING),
        blocks=by_model,
        look=lambda head: (style.OTHER if head["gradient"] == ROUNDING else style.RMS, "-"),
        title=by_gradient,
        size=1.4,
        text="At the last record, divided by that of the bf16 run with the same seed, by the "
        "format of the weight gradient.",
    ),
    "gradient_magnitude": Panels(
        studies=("gradient_magnitude",),
        table=gradients,
        plots=(plot_gradients,),
        facet=by(
            ["model", "label"],
            lambda at: f"{naming.model(at[0])}, {at[1]}".replace(" (", "\n("),
        ),
        size=(1, 2.0),
        title=ratios_of_ends,
        shows=measures.comparing("model", "intervention"),
        what="gradient of the MLP's output layer (mlp.c_proj.weight) of blocks of the vision tower",
        text="After the appendix of arXiv:2304.13013, which shows the mean in place of the norm. "
        f"Lines: centered box average over at most {style.SMOOTHING} records of a run, edges cut; "
        "faint: every record. Gradients that are 0 or not finite are gaps, and the axes leave out "
        f"the lowest {BELOW:.1%} of the others.",
    ),
    "layer_noise": Panels(
        studies=("weight_gradient",),
        where=lambda heads: heads[
            [(as_path(path) / "quant_error.jsonl").exists() for path in heads["path"]]
        ],
        table=noises,
        plots=(plot_noises, plot_zeros),
        facet=by("tower"),
        size=(1, 2.2),
        title=most_zeros,
        what="weight gradients of layers",
        text="If each recipe quantizes them: signal to quantization noise, and the share of "
        "elements of the output gradient g that become 0. Lines: medians of layers; bands, for two "
        "recipes: their middle half.",
    ),
}
