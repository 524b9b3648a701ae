"""Noise of a weight gradient by format over training, and the elements that become zero.

Not in the paper. Rows of `python -m experiments.quant_error` for runs of
`experiment=weight_gradient`; layers and numbers of tokens are those that it measured.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from analysis import measures, naming, panels, run_files, style
from analysis.load import NoRunsError, Runs
from analysis.run_files import as_path

PRODUCT, OPERAND = "grad_weight", "g"
FACTS = ("tower", "step", "recipe", "layer", "terms", "sqnr_db", "underflowed")
COLUMNS = (*measures.OF_A_RUN, *FACTS)
VISION, TEXT = "vision tower", "text tower"


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """The runs whose layers were measured."""
    return heads[[(as_path(path) / "quant_error.jsonl").exists() for path in heads["path"]]]


def query(runs: Runs) -> pd.DataFrame:
    """One row per step, recipe and layer whose weight gradient the recipe quantizes.

    `terms`: number of tokens in the sum, the largest that was measured; `sqnr_db` of the product;
    `underflowed`: share of the non-zero elements of g that become 0. NoRunsError without rows.
    """
    heads = measures.named_heads(runs)
    frame = measures.by_run(runs, select(heads), COLUMNS, _rows)
    if frame.empty:
        raise NoRunsError("no quantization errors: python -m experiments.quant_error run=RUN")
    return frame


def _rows(run: Runs, head: dict) -> pd.DataFrame:
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


def plot(frame: pd.DataFrame, ax: Axes, value: str = "sqnr_db") -> Axes:
    """One panel for one tower: the median over layers by step, and the middle half of them."""
    recipes = sorted(frame["recipe"].unique(), key=lambda name: naming.rank(name, style.PRECISIONS))
    for recipe in recipes:
        by_step = frame[frame["recipe"] == recipe].groupby("step")[value]
        low, middle, high = (by_step.quantile(q) for q in (0.25, 0.5, 0.75))
        color = style.color(recipe, "")
        ax.fill_between(middle.index, low, high, color=color, alpha=0.12, lw=0)
        ax.plot(middle.index, middle, "-o", ms=2.5, color=color, label=naming.precision(recipe))
    ax.set(xlabel="step", title=frame["tower"].iloc[0])
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws the noise of each tower and the zeros of the first one, above one legend."""
    towers = [frame[frame["tower"] == name] for name in (VISION, TEXT)]
    towers = [tower for tower in towers if len(tower)]
    figure.set_size_inches(2 * style.COLUMN_WIDTH, 2.4)
    *noises, zeros = figure.subplots(1, len(towers) + 1)
    for tower, ax in zip(towers, noises, strict=True):
        plot(tower, ax)
    panels.share_limits(noises)
    noises[0].set_ylabel("signal to noise of the\nweight gradient (dB)")
    plot(towers[0], zeros, "underflowed").yaxis.set_major_formatter(PercentFormatter(1))
    zeros.set(ylim=(0, None), ylabel="elements of g that become 0")
    panels.legend_below(figure, noises)


def caption(frame: pd.DataFrame) -> str:
    """Describes the run and the layers."""
    terms = naming.join(f"{terms:,}" for terms in sorted(frame["terms"].unique()))
    return (
        f"Weight gradients of {frame['layer'].nunique()} layers of {measures.of_runs(frame)}, "
        f"summed over {terms} tokens, if each recipe quantizes them: signal to quantization "
        "noise, and the share of elements of the output gradient g that become 0. Lines: medians "
        "of layers; bands: their middle half."
    ) + measures.caption_end(frame, crosses=False)
