"""Judges claims at true size, and scores predictions, by experiments/PROTOCOL.md ("True size").

Recipes are compared by the logarithm of the validation loss, paired by seed; the largest model with
runs is judged.
"""

import functools
import math

import numpy as np
import pandas as pd
from scipy import stats

from analysis import comparison, evidence, paper, style
from analysis.evidence import (
    ALPHA,
    TWO_ONE_SIDED,
    UNDECIDED,
    Evidence,
    Finding,
    Sample,
    decide,
    lacking,
)
from analysis.load import NoRunsError

SCALE, RECIPE, LARGEST = "true_size", "precision.label", "vit_h14"
STUDIES = ("weight_gradient", "lr_map", "accuracy_vs_size")
FP8, INT8_GRADIENT = "hw_fp8_tensorwise", "grad_weight int8"
MARGIN = 3.0  # % of the validation loss: less is equal
TRAINS, FAILS = 0.1, 1.0  # nats of validation loss above the model's best bf16 run
EARLY = 300  # step of the early record of features
UPPER = 0.8  # one-sided level of the standard deviation from which seeds are planned
MOST_SEEDS = 1000
EQUAL, HIGHER = "equal", "higher"
FAMILY = {  # Holm's correction is for these: two recipes, how the first one's loss compares
    ("switchback", "bf16"): EQUAL,
    (FP8, "bf16"): EQUAL,
    ("llm_int8", "switchback"): HIGHER,
    ("llm_int8", "bf16"): HIGHER,
}


def compare(records: Evidence, one: str, other: str, how: str) -> Finding:
    """Judges whether the validation loss of a recipe equals another's, or is higher.

    Equality: two one-sided tests with MARGIN. p-values of FAMILY are corrected.
    """
    by_model = changes(records, one, other)
    sample_of = functools.partial(Sample.of, level=TWO_ONE_SIDED)
    ours = "; ".join(f"{style.model(name)} {sample_of(x)}" for name, x in by_model.items())
    ours = f"validation loss, %, 90%: {ours}"
    model, values = list(by_model.items())[-1]
    sample, p = sample_of(values), p_value(values, how)
    if FAMILY.get((one, other)) == how:
        p = evidence.holm(_p_values(records, model))[one, other]
    ours += f"; {style.model(model)}: p = {p:.2g}" + (
        " by Holm's correction for four tests" if (one, other) in FAMILY else ""
    )
    margin = _log(MARGIN)
    refuted = sample.low > margin or sample.high < -margin if how == EQUAL else sample.high < 0
    holds = True if p < ALPHA else False if refuted else None
    needed = num_seeds(values, how)
    why = f"{needed} seeds would decide it" if needed else f"not by {MOST_SEEDS:,} seeds"
    why += " if the difference stays as it is"
    return decide(ours, holds, len(values), records.outcomes(STUDIES, SCALE), why)


def changes(records: Evidence, one: str, other: str) -> dict[str, pd.Series]:
    """By model, small to large: 100 log(validation loss with `one` / with `other`), by seed."""
    runs = records.outcomes(STUDIES, SCALE)
    runs = runs.assign(log_loss=100 * np.log(runs["validation_loss"]))
    groups = evidence.paired(runs, RECIPE, one, other, "log_loss")
    if not groups:
        raise lacking(f"{one} and {other} with equal settings and seeds", STUDIES, SCALE)
    return {
        name: evidence.difference(group, RECIPE, one, other, "log_loss").dropna()
        for name, group in groups.items()
    }


def p_value(values: pd.Series, how: str) -> float:
    """One-sided t test that the mean is above 0, or within the margin; 1 for one seed."""
    if len(values) < 2:
        return 1.0
    bars = (0.0,) if how == HIGHER else (-_log(MARGIN), _log(MARGIN))
    sides = ("greater", "less")
    tests = (
        stats.ttest_1samp(values, bar, alternative=s) for bar, s in zip(bars, sides, strict=False)
    )
    return float(max(test.pvalue for test in tests))


def num_seeds(values: pd.Series, how: str) -> int | None:
    """Seeds that decide if the mean stays and the deviation is at its upper limit; None: too many.

    The level is ALPHA divided by the number of tests in FAMILY.
    """
    num, mean = len(values), float(values.mean())
    if num < 2:
        return None
    limit = values.std() * math.sqrt((num - 1) / stats.chi2.ppf(1 - UPPER, num - 1))
    room = mean if how == HIGHER else _log(MARGIN) - abs(mean)
    for n in range(num + 1, MOST_SEEDS):
        if stats.t.ppf(1 - ALPHA / len(FAMILY), n - 1) * limit / math.sqrt(n) < room:
            return n
    return None


def penalty_by_size(records: Evidence) -> Finding:
    """Judges whether LLM.int8()'s penalty in validation loss grows with the model, at one rate."""
    by_model = changes(records, "llm_int8", "bf16")
    table = pd.DataFrame(by_model).dropna()
    ours = "; ".join(f"{style.model(name)} {values.mean():+.1f}%" for name, values in table.items())
    if table.shape[1] < 3 or len(table) < 2:
        return Finding(ours, UNDECIDED, "a trend needs three models and two seeds")
    p, reverse = evidence.page(table), evidence.page(table.iloc[:, ::-1])
    ours = f"validation loss above bf16's: {ours}; Page's test p = {p:.2g} ({len(table)} seeds)"
    holds = True if p < ALPHA else False if reverse < ALPHA else None
    why = "all sizes at one learning rate; each size's best rate is not run"
    return decide(ours, holds, len(table), records.outcomes(STUDIES, SCALE), why)


def outcomes(records: Evidence, recipe: str) -> pd.DataFrame:
    """For each model and learning rate with both: `bf16` and `recipe`, lists of outcomes of runs.

    A run "trains", is "degraded" or "fails" by its validation loss above the best bf16 run.
    """
    runs = records.outcomes(STUDIES, SCALE)
    is_16 = runs[RECIPE] == "bf16"
    best = np.log(runs["validation_loss"][is_16]).groupby(runs["model.name"]).min()
    above = np.log(runs["validation_loss"]) - runs["model.name"].map(best)
    words = pd.Series("degraded", runs.index).mask(above <= TRAINS, "trains")
    words = words.mask((above > FAILS) | above.isna() | (runs["state"] == "diverged"), "fails")
    by = [runs["model.name"], runs["optimizer.lr"], runs[RECIPE]]
    return words.groupby(by).agg(list).unstack()[["bf16", recipe]].dropna()


def fails(records: Evidence, recipe: str) -> Finding:
    """Judges whether ViT-H/14 fails in a recipe at a learning rate at which it trains in bf16."""
    runs = records.outcomes(STUDIES, SCALE)
    if not {"bf16", recipe} <= set(runs[RECIPE]):
        raise lacking(f"bf16 and {recipe}", STUDIES, SCALE)
    table = outcomes(records, recipe)
    pairs = table[table["bf16"].map(lambda words: set(words) == {"trains"})]
    parts = [
        f"{style.model(model)} at {lr:g}: {', '.join(words)}"
        for (model, lr), words in pairs[recipe].items()
    ]
    largest = pairs[pairs.index.get_level_values(0) == LARGEST][recipe]
    failing = [words for words in largest if len(words) > 1 and set(words) == {"fails"}]
    num_rates = len(largest)
    holds = True if failing else None
    why = f"ViT-H/14 was trained at {comparison.counted(num_rates, 'rate')} at which bf16 trains"
    return decide("; ".join(parts), holds, 2, runs, f"{why}; six are planned")


def feature_ratios(records: Evidence, recipe: str, model: str = LARGEST) -> pd.Series:
    """By seed: E[abs(x)] of the last vision block at step EARLY, relative to bf16."""
    runs = records.outcomes(STUDIES, SCALE)
    runs = evidence.paired(runs, RECIPE, recipe, "bf16", "validation_loss").get(model)
    if runs is None:
        raise lacking(f"{recipe} and bf16 of {model}", STUDIES, SCALE)
    block = paper.BLOCK.format(int(runs["model.vision_layers"].iloc[0]) - 1)
    loaded = records.runs(STUDIES, SCALE)
    values = {
        row.run: loaded.only(row.run).series(block, "feature_mean").get(EARLY, math.nan)
        for row in runs.itertuples()
    }
    runs = runs.assign(size=runs["run"].map(values))
    sides = [runs[runs[RECIPE] == name].groupby("seed")["size"].mean() for name in (recipe, "bf16")]
    return sides[0] / sides[1]


def predictions(records: Evidence) -> list[tuple[str, str, str]]:
    """The predictions of PROTOCOL.md: each with our numbers and its score."""
    rows = (
        ("the int8 weight gradient enlarges the features of ViT-H/14 at step 300: ratio above 1.2",
         _predicted_ratio, {"recipes": (INT8_GRADIENT, "llm_int8"), "low": 1.2}),
        ("SwitchBack int8 does not: ratio between 0.9 and 1.1",
         _predicted_ratio, {"recipes": ("switchback",), "low": 0.9, "high": 1.1}),
        ("KQ layer norm lets ViT-H/14 train in bf16 at a learning rate of 2e-3: R@1 above 60%",
         _predicted_recall, {}),
        ("tensor-wise fp8 trains at every learning rate at which bf16 does", _predicted_fp8, {}),
        ("LLM.int8()'s penalty at each size's best rate does not grow with width",
         _predicted_penalty, {}),
    )  # fmt: skip
    scored = []
    for text, score, options in rows:
        try:
            scored.append((text, *score(records, **options)))
        except NoRunsError:
            scored.append((text, "-", "open: no runs"))
    return scored


def _predicted_ratio(
    records: Evidence, recipes: tuple[str, ...], low: float, high: float = math.inf
) -> tuple[str, str]:
    ratios = {name: feature_ratios(records, name) for name in recipes}
    ours = "; ".join(
        f"{style.precision(name)} {' and '.join(f'{ratio:.2f}' for ratio in values)}"
        for name, values in ratios.items()
    )
    every = pd.concat(ratios.values())
    return ours, "true" if every.between(low, high).all() else "false"


def _predicted_recall(records: Evidence) -> tuple[str, str]:
    runs = records.outcomes(("interventions",), SCALE)
    at_rate = runs[(runs["intervention.name"] == "kq_norm") & (runs["optimizer.lr"] == 2e-3)]
    if at_rate.empty:
        raise lacking("KQ norm at 2e-3", ("interventions",), SCALE)
    ours = " and ".join(f"{recall:.1f}%" for recall in at_rate["recall"])
    return ours, "true" if (at_rate["recall"] > 60).all() else "false"


def _predicted_fp8(records: Evidence) -> tuple[str, str]:
    table = outcomes(records, FP8)
    trains = [words for words in table[FP8] if set(words) == {"trains"}]
    bf16 = [words for words in table["bf16"] if set(words) == {"trains"}]
    ours = f"trains in {len(trains)} of {len(bf16)} settings of model and rate"
    num_rates = table.index.get_level_values("optimizer.lr").nunique()
    if len(trains) < len(bf16):
        return ours, "false"
    return f"{ours}, all at {comparison.counted(num_rates, 'rate')}", "open: more rates"


def _predicted_penalty(records: Evidence) -> tuple[str, str]:
    return penalty_by_size(records).ours, "open: one rate for all sizes"


def _p_values(records: Evidence, model: str) -> dict[tuple[str, str], float]:
    """p-values of FAMILY for a model; 1 for recipes without runs."""
    p_values = {}
    for (one, other), how in FAMILY.items():
        try:
            values = changes(records, one, other).get(model, pd.Series(dtype=float))
        except NoRunsError:
            values = pd.Series(dtype=float)
        p_values[one, other] = p_value(values, how)
    return p_values


def _log(percent: float) -> float:
    """A change in % as 100 times the logarithm of the ratio."""
    return 100 * math.log1p(percent / 100)
