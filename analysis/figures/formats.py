"""Mean R@1 by number format, against bits per operand.

Not in the paper, which precedes most of the formats.
"""

import math
import re

import numpy as np
import pandas as pd

from analysis import comparison, measures, naming
from analysis.figures.scores import MEASURES, SCORES, named_by_exception, scores
from analysis.load import Runs
from analysis.points import Rows
from lowprec.nn.recipe import RECIPES, Operand

SCALE_BITS = {"float32": 32, "e8m0": 8, "e4m3": 8}


def by_bits(runs: Runs) -> pd.DataFrame:
    """One row per run: bits per operand, and the scores at its last step, or NaN.

    Runs that have no score and did not diverge are left out, as are custom recipes.
    """
    heads = scores(runs)
    heads = heads[heads["precision.recipe"].isin(list(RECIPES))]
    of_run = [_mean_bits(head) for head in heads.to_dict("records")]
    heads = heads.assign(bits=of_run).sort_values("bits", ascending=False, kind="stable")
    return heads[[*measures.OF_A_RUN, "bits", *MEASURES]]


def _mean_bits(head: dict) -> float:
    """The mean of `bits` over the steps of a run, whose precision may change."""
    before = bits(head["precision.recipe"], head["precision.autocast"])
    if pd.isna(head["precision_change.step"]):
        return before
    precision = comparison.precision_after(head)
    share = (head["precision_change.step"] - 1) / head["num_steps"]
    return share * before + (1 - share) * bits(precision.recipe, precision.autocast)


def bits(recipe: str, autocast: str) -> float:
    """Mean bits per number over the six operands of a layer's products, with scales of tiles.

    Scales of whole rows, columns and tensors count nothing: less than 0.1 bits at width 384.
    """
    high = 32.0 if autocast == "fp32" else 16.0
    products = RECIPES[recipe].products
    pairs = [(_bits(p.first), _bits(p.second)) if p else (high, high) for p in products]
    return float(np.mean(pairs))


def _bits(operand: Operand) -> float:
    parts = re.match(r"e(\d+)m(\d+)", operand.format)
    tile = re.fullmatch(r"(\d+)x(\d+)", operand.granularity)
    scale = SCALE_BITS[operand.scale] / math.prod(map(int, tile.groups())) if tile else 0
    return (1 + int(parts[1]) + int(parts[2]) if parts else 8) + scale


def lowest_format(frame: pd.DataFrame) -> str:
    """The title of `formats`: the recipe with the lowest mean R@1, and how many have fewer bits."""
    means = frame.groupby(["precision", "bits"])["recall"].mean().dropna()
    if means.empty:
        return ""
    name, bits = means.idxmin()
    num = (means.index.get_level_values("bits") < bits).sum()
    others = f", below {comparison.counted(num, 'recipe')} with fewer bits" if num else ""
    return f"{naming.precision(name)} has the lowest mean R@1{others}"


FIGURES = {
    "formats": Rows(
        studies=("formats", "accuracy_vs_size"),
        same_but=("precision.label",),
        table=by_bits,
        values=SCORES,
        blocks=lambda frame: [("", frame.sort_values("bits", ascending=False, kind="stable"))],
        name=lambda head: f"{named_by_exception(head)}, {round(head['bits'], 2):g} bits",
        title=lowest_format,
        shows=measures.comparing("precision", value="recall"),
        text="Bits: the mean over the operands of a layer's three products, "
        "with the scales of tiles; a product left in 16 bits counts as 16, and a run that changes "
        "its format as the mean over its steps.",
    )
}
