"""Mean R@1 and validation loss by number format, against bits per operand and step time.

Not in the paper, which precedes most of the formats. Step times: lines of
`python -m experiments.benchmarks step` in the folder of the runs, if there are any.
"""

import math
import re

import numpy as np
import pandas as pd

from analysis import bench, comparison, measures, naming
from analysis.figures.scores import MEASURES, SCORES, scores
from analysis.grammar import Axis, Points
from analysis.load import Runs
from lowprec.nn.recipe import RECIPES, Operand

OF_A_LINE = ("ms", "batches", "timed_with", "file")
COLUMNS = (*measures.OF_A_RUN, "gpu", "bits", *OF_A_LINE, *MEASURES)
AXES = (Axis(column="bits", label="bits per operand, with scales", apart=0.3),
        Axis(column="ms", label="ms per training step"))  # fmt: skip
AS_RUN = {  # key of a step's line: the same of a run
    "device": "gpu",
    "dtype": "precision.autocast",
    "image_size": "model.image_size",
    "patch_dropout": "model.patch_dropout",
    "compiled": "compile",
    "accumulate": "accumulate",
}
NATIVE = [  # recipes without fake-quantized products
    name for name, recipe in RECIPES.items() if all(p is None or p.native for p in recipe.products)
]
SCALE_BITS = {"float32": 32, "e8m0": 8, "e4m3": 8}


def by_bits(runs: Runs) -> pd.DataFrame:
    """One row per run: bits per operand, ms per step, and both measures at its last step, or NaN.

    Runs that have no measure and did not diverge are left out, as are custom recipes.
    """
    heads = scores(runs)
    heads = heads[heads["precision.recipe"].isin(list(RECIPES))]
    of_run = [_mean_bits(head) for head in heads.to_dict("records")]
    heads = heads.assign(bits=of_run).sort_values("bits", ascending=False, kind="stable")
    return with_times(heads, bench.read_lines(runs.root, "step"))[list(COLUMNS)]


def with_times(heads: pd.DataFrame, lines: pd.DataFrame) -> pd.DataFrame:
    """Adds the `ms` of a training step, and the line's `batches` and `file`, to each run, or NaN.

    A line counts if its GPU, model, batch, recipe and other settings are the run's; its optimizer
    may be another (`timed_with`). Those of one setting are from one file, the newest with a time in
    16 bits. Fake-quantized recipes and runs that change their precision have none.
    """
    checkpointed = heads["checkpointing"].map({True: ", checkpointing", False: ""})
    shape = heads["model"] + " batch " + heads["batch_size"].astype(str) + checkpointed
    setting = comparison.joined(heads.assign(shape=shape), ["shape", *AS_RUN.values()])
    is_constant = heads["precision_change.step"].isna()
    heads = heads.assign(setting=setting, case=heads["precision.recipe"].where(is_constant))
    lines = lines.rename(columns={"optimizer": "timed_with"}).assign(accumulate=1)
    lines = lines.reindex(columns=["shape", *AS_RUN, "case", *OF_A_LINE]).astype({"case": str})
    lines = lines[lines["ms"].notna() & lines["case"].isin(NATIVE)]
    lines = lines.assign(setting=comparison.joined(lines, ["shape", *AS_RUN]))
    newest = lines[lines["case"] == "high"].groupby("setting")["file"].max()
    lines = lines[lines["file"] == lines["setting"].map(newest)]
    lines = lines.drop_duplicates(["setting", "case"], keep="last")
    return heads.join(lines.set_index(["setting", "case"])[[*OF_A_LINE]], on=["setting", "case"])


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


def times_in_words(frame: pd.DataFrame) -> str:
    """Where the step times are from, and which methods have none."""
    timed = frame[frame["ms"].notna()]
    if timed.empty:
        return ""
    names = ("gpu", "batches", "timed_with")
    gpus, batches, optimizers = (naming.join(timed[name].unique()) for name in names)
    num = comparison.counted(timed["file"].nunique(), "run")
    optimizer = naming.method("", timed["optimizer"].iloc[0])
    methods = frame.loc[frame["ms"].isna(), "method"].str.replace(optimizer, "", regex=False)
    untimed = "; ".join(methods.unique())
    return (
        f" Step times: {num} of the benchmark `step` on {gpus} with batches {batches} "
        f"and optimizer={optimizers}."
        + f" No step time (fake-quantized or not measured): {untimed}."
        * bool(untimed)
    )


FIGURES = {
    "formats": Points(
        studies=("formats", "accuracy_vs_size"),
        same_but=("precision.label",),
        table=by_bits,
        x=AXES,
        y=SCORES[:1],
        name=lambda head: f"{naming.precision(head['precision'])}, {head['bits']:.3g} bits",
        text="Bits: mean over the operands of a layer's three products, with the scales of tiles; "
        "a product left in 16 bits counts as 16, and a run that changes its format as the mean "
        "over its steps. Methods with nearly equal bits are set apart.",
        notes=times_in_words,
    )
}
