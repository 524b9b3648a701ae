"""Judges claims at true size, and scores predictions, by experiments/PROTOCOL.md ("True size").

Recipes are compared by the logarithm of the validation loss, paired by seed; the largest model with
runs is judged.
"""

import contextlib
import math
from collections.abc import Sequence
from functools import partial

import numpy as np
import pandas as pd
from scipy import stats

from analysis import comparison, evidence, naming
from analysis.evidence import ALPHA, TWO_ONE_SIDED, UNDECIDED, Evidence, Finding, Sample
from analysis.judges import H14, RECIPE, feature_ratios
from analysis.load import NoRunsError

EQUALITY = "equality"  # alone decides FAMILY: its seeds have chosen nothing
STUDIES = ("weight_gradient", "lr_map", EQUALITY, "accuracy_vs_size")
OF_WIDTH, WIDTHS = "weight_gradient", ["vit_b14", "vit_l14", "vit_h14"]  # the sizes it names
FP8, INT8_GRADIENT = "hw_fp8_tensorwise", "grad_weight int8"
MARGIN = 3.0  # % of the validation loss: less is equal
LOG_MARGIN = math.log1p(MARGIN / 100)
TRAINS, FAILS = 0.1, 1.0  # nats: the validation loss minus that of the model's best bf16 run
EARLY = 300  # step of the early record of features
EQUAL, HIGHER, WORSE = "equal", "higher", "worse"  # WORSE: by the test of EQUAL, which denies it
FAMILY = {  # Holm's correction is for these: two recipes, how the first one's loss compares
    ("switchback", "bf16"): EQUAL,
    (FP8, "bf16"): EQUAL,
    ("llm_int8", "switchback"): HIGHER,
    ("llm_int8", "bf16"): HIGHER,
}


def compare(records: Evidence, one: str, other: str, how: str) -> Finding:
    """Judges whether the validation loss of a recipe equals another's, is higher or worse.

    Equality: two one-sided tests with MARGIN. Worse: higher by more than MARGIN; refuted by
    equality. p-values of FAMILY are corrected. A diverged run has no loss, so that its pair decides
    nothing. The seeds that would confirm it are counted at ALPHA over the number of tests, those
    that would refute it at ALPHA.
    """
    by_model = changes(records, one, other)
    *_, (model, values) = by_model.items()
    ours = "; ".join(f"{naming.model(name)} {percent(x)}" for name, x in by_model.items())
    ours = f"validation loss, %, 90%: {ours}"
    if diverged := int(np.isinf(values).sum()):
        return Finding(ours, UNDECIDED, f"one run of a pair diverged in {diverged} of its seeds")
    test = EQUAL if how == WORSE else how
    p, num_tests, also = p_value(values, test), 1, ""
    if FAMILY.get((one, other)) == test:
        p, num_tests = evidence.holm(_p_values(records, model))[one, other], len(FAMILY)
        also = " by Holm's correction for four tests"
    also = f" for equality{also}" if how == WORSE else also
    ours += f"; {naming.model(model)}: p = {p:.2g}{also}"
    sample = Sample.of(values, TWO_ONE_SIDED)
    is_below = sample.high < (0 if how == HIGHER else -LOG_MARGIN)
    is_above = sample.low > LOG_MARGIN
    holds = True if p < ALPHA else False if is_below or (how == EQUAL and is_above) else None
    if how == WORSE:
        holds = True if is_above else False if holds is not None else None
    room = sample.mean if test == HIGHER else LOG_MARGIN - abs(sample.mean)
    why = evidence.seeds_needed(values, room, ALPHA / num_tests if room > 0 else ALPHA)
    return records.decide(ours, holds, len(values), why)


def changes(
    records: Evidence, one: str, other: str, studies: Sequence[str] = ()
) -> dict[str, pd.Series]:
    """By model, small to large: log(validation loss with `one` / with `other`), by seed.

    It is infinite if one of the two diverged; a seed in which both did is left out. Unless studies
    are given, those of FAMILY are the runs of EQUALITY, if there are any, and others of STUDIES.
    """
    if not studies:
        at_scale = records.summaries["scale"] == records.scale
        ran = set(records.summaries.loc[at_scale, "experiment"])
        planned = (one, other) in FAMILY and EQUALITY in ran
        studies = (EQUALITY,) if planned else STUDIES
    return records.differences(RECIPE, one, other, "log_loss", studies)


def p_value(values: pd.Series, how: str) -> float:
    """One-sided t test that the mean is above 0, or within the margin; 1 for one seed."""
    if len(values) < 2:
        return 1.0
    if how == HIGHER:
        return float(stats.ttest_1samp(values, 0, alternative="greater").pvalue)
    above = stats.ttest_1samp(values, -LOG_MARGIN, alternative="greater").pvalue
    below = stats.ttest_1samp(values, LOG_MARGIN, alternative="less").pvalue
    return float(max(above, below))


def penalty_by_size(records: Evidence) -> Finding:
    """Judges whether LLM.int8()'s penalty in validation loss grows with the model, at one rate."""
    by_model = changes(records, "llm_int8", "bf16", (OF_WIDTH,))
    table = pd.DataFrame(by_model).reindex(columns=WIDTHS).dropna()
    means = {name: 100 * math.expm1(values.mean()) for name, values in by_model.items()}
    ours = "; ".join(f"{naming.model(name)} {mean:+.1f}%" for name, mean in means.items())
    ours = f"validation loss above bf16's: {ours}"
    if len(table) < 2:
        return Finding(ours, UNDECIDED, "a trend needs three models and two seeds")
    p, reverse = evidence.page(table), evidence.page(table.iloc[:, ::-1])
    ours += f"; Page's test p = {p:.2g} ({len(table)} seeds)"
    holds = True if p < ALPHA else False if reverse < ALPHA else None
    why = "all sizes at one learning rate; each size's best rate is not run"
    return records.decide(ours, holds, len(table), why)


def outcomes(records: Evidence) -> pd.DataFrame:
    """For each model and learning rate at which bf16 trains: outcomes by seed of `bf16` and FP8.

    A run "trains", is "degraded" or "fails" by its validation loss above that of the best bf16 run
    whose settings, but for the rate, are its own. Chance is more than FAILS above it.
    """
    runs = comparison.distinct(records.outcomes((*STUDIES, "interventions")))
    runs = runs[runs["validation_loss"].notna() | (runs["state"] == "diverged")]
    losses = runs["validation_loss"].mask(runs["state"] == "diverged", math.inf)
    same = comparison.signature(runs, RECIPE, "optimizer.lr", seed=False).rename("settings")
    above = losses - losses.where(runs[RECIPE] == "bf16").groupby(same).transform("min")
    words = pd.Series("degraded", runs.index).mask(above <= TRAINS, "trains")
    words = words.mask((above >= FAILS) | np.isinf(losses), "fails")
    size = runs["model.name"].map(naming.order("model.name")).rename("size")
    by = [size, same, runs["model.name"], runs["optimizer.lr"], runs[RECIPE]]
    table = words.groupby(by).agg(list).unstack().reindex(columns=["bf16", FP8]).dropna()
    if table.empty:
        raise records.lacking(f"bf16 and {FP8} at equal rates", STUDIES)
    table = table.droplevel(["size", "settings"])
    return table[table["bf16"].map(_all_train)]


def _all_train(words: list[str]) -> bool:
    return set(words) == {"trains"}


def _counts(words: list[str]) -> str:
    """`trains 6x, degraded`."""
    counts = pd.Series(words).value_counts(sort=False).items()
    return ", ".join(word if num == 1 else f"{word} {num}x" for word, num in counts)


def fails(records: Evidence) -> Finding:
    """Judges whether ViT-H/14 fails in FP8 at a learning rate at which it trains in bf16.

    Both need two seeds.
    """
    pairs = outcomes(records)
    ours = "; ".join(
        f"{naming.model(model)} at {lr:g}: {_counts(words)}"
        for (model, lr), words in pairs[FP8].items()
    )
    largest = pairs[pairs.index.get_level_values("model.name") == H14]
    lone = largest[largest.map(len).min(axis=1) < 2]
    failing = largest[FP8].map(lambda words: set(words) == {"fails"})
    if failing.drop(lone.index).any():
        return Finding(ours, records.verdict(True))
    rates = comparison.counted(len(largest), "rate")
    why = f"ViT-H/14 was trained at {rates} at which bf16 trains"
    return Finding(ours, UNDECIDED, f"{why}; one seed at some" if len(lone) else why)


def _ratios(
    records: Evidence, recipes: Sequence[str], low: float, high: float = math.inf
) -> tuple[str, str]:
    of_models = {name: feature_ratios(records, name, STUDIES, EARLY) for name in recipes}
    ratios = {name: by_model.get(H14) for name, by_model in of_models.items()}
    if missing := [name for name, values in ratios.items() if values is None]:
        raise records.lacking(f"{missing[0]} and bf16 of {H14}", STUDIES)
    ours = "; ".join(
        f"{naming.PRECISIONS.get(name, [name])[0]} {_values(values)}"
        for name, values in ratios.items()
    )
    are_inside = pd.concat(ratios.values()).between(low, high).all()
    return ours, _score(are_inside, min(map(len, ratios.values())))


def _values(ratios: pd.Series) -> str:
    """`2.01 and 1.75`, `1.72 to 1.88 (6 seeds)`."""
    if len(ratios) < 3:
        return " and ".join(map("{:.2f}".format, ratios))
    return f"{ratios.min():.2f} to {ratios.max():.2f} ({len(ratios)} seeds)"


def _kq_norm(records: Evidence) -> tuple[str, str]:
    runs = records.outcomes(("interventions",))
    is_it = (runs["intervention.name"] == "kq_norm") & (runs["optimizer.lr"] == 2e-3)
    recalls = runs.loc[is_it & (runs["model.name"] == H14), "recall"]
    if recalls.empty:
        raise records.lacking("kq_norm at 0.002", ("interventions",))
    ours = " and ".join(map("{:.1f}%".format, recalls))
    return ours, _score((recalls > 60).all(), len(recalls))


def _fp8(records: Evidence) -> tuple[str, str]:
    table = outcomes(records)
    trains, fewest = table[FP8].map(_all_train), table.map(len).min(axis=1)
    num_rates = table.index.unique("optimizer.lr").size
    ours = f"trains in {trains.sum()} of {len(trains)} settings of model and rate, "
    ours += comparison.counted(num_rates, "rate")
    if (table[FP8].map(lambda words: "trains" not in words) & (fewest > 1)).any():
        return ours, "false"
    if not trains.all() or fewest.min() < 2:
        return ours, "open: more seeds"
    return ours, "true" if num_rates > 1 else "open: more rates"


def _score(holds: bool, num: int) -> str:
    """The score of a prediction that holds in every seed or not; nothing follows from one seed."""
    return "open: one seed" if num < 2 else "true" if holds else "false"


PREDICTIONS = {  # of PROTOCOL.md: our numbers and the score
    "the int8 weight gradient enlarges the features of ViT-H/14 at step 300: ratio above 1.2":
        partial(_ratios, recipes=(INT8_GRADIENT, "llm_int8"), low=1.2),
    "SwitchBack int8 does not: ratio between 0.9 and 1.1":
        partial(_ratios, recipes=("switchback",), low=0.9, high=1.1),
    "KQ layer norm lets ViT-H/14 train in bf16 at a learning rate of 2e-3: R@1 above 60%": _kq_norm,
    "tensor-wise fp8 trains at every learning rate at which bf16 does": _fp8,
    "LLM.int8()'s penalty at each size's best rate does not grow with width":
        lambda records: (penalty_by_size(records).ours, "open: one rate for all sizes"),
}  # fmt: skip


def predictions(records: Evidence) -> list[tuple[str, str, str]]:
    """Each prediction with our numbers and its score."""
    rows = []
    for text, scored in PREDICTIONS.items():
        try:
            rows.append((text, *scored(records.at(evidence.TRUE_SIZE))))
        except NoRunsError:
            rows.append((text, "-", "open: no runs"))
    return rows


def _p_values(records: Evidence, model: str) -> dict[tuple[str, str], float]:
    """p-values of FAMILY for a model; 1 for recipes without runs, or of which one diverged."""
    p_values = dict.fromkeys(FAMILY, 1.0)
    for (one, other), how in FAMILY.items():
        with contextlib.suppress(NoRunsError):
            values = changes(records, one, other).get(model, pd.Series(dtype=float))
            if np.isfinite(values).all():
                p_values[one, other] = p_value(values, how)
    return p_values


def percent(logs: pd.Series) -> Sample:
    """Mean and 90% interval of finite logarithms of ratios, as changes in %."""
    sample = Sample.of(logs[np.isfinite(logs)], TWO_ONE_SIDED)
    ends = (100 * math.expm1(value) for value in (sample.mean, sample.low, sample.high))
    return Sample(*ends, sample.num)
