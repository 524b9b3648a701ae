"""The page of results and its appendices agree with the committed records.

Tests that read the records of many studies are slow; CI runs them.
"""

import math
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis import evidence, load_runs, measures, naming, paper, size_judges
from analysis.figures import (
    FIGURES,
    attention_logits,
    feature_size,
    recipes_by_size,
    rounding,
)
from analysis.figures import early_warnings as predictors
from analysis.load import load_all
from tests.analysis.test_spike_claims import permuted

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
PAGE = " ".join((ROOT / "experiments" / "RESULTS.md").read_text().split())
README = " ".join((ROOT / "README.md").read_text().split())
LINES = (ROOT / "experiments" / "RESULTS.md").read_text().splitlines()
CLAIMS = (RESULTS / "claims.md").read_text()
APPENDICES = sorted(set(RESULTS.glob("*.md")) - {RESULTS / "claims.md", RESULTS / "README.md"})
PRECISIONS = {
    "bf16": "bf16",
    "SwitchBack int8": "switchback",
    "LLM.int8()": "llm_int8",
    "fp8 tensor-wise (fake-quantized)": "fp8_tensorwise",
    "SwitchBack fp8 (fake-quantized)": "fp8_switchback",
    "SwitchBack fp8 (hardware)": "hw_fp8_switchback",
    "`switchback_q`": "switchback_q",
    "fp8 in blocks of 128": "fp8_blockwise",
    "the same, multiplied in fp8 (`hw_fp8_blockwise`)": "hw_fp8_blockwise",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "NVFP4 with Hadamard rotation and stochastic rounding": "nvfp4_rht_sr",
}
OPTIMIZERS = {
    "AdamW": "adamw",
    "StableAdamW": "stable_adamw",
    "AdamW, gradient norm clipped at 4.0": "adamw_clip",
    "AdamW, ZClip": "adamw_zclip",
    "AdamW, SkipStep": "adamw_skip_step",
    "AdaGC": "adagc",
    "Muon": "muon",
    "StableSPAM": "stable_spam",
}
WARNINGS = {
    "AdamW, clipped at warnings": "clip",
    "AdamW, beta2 0.9 at warnings": "beta2",
    "AdamW, skipped at warnings": "skip",
}


def rows_of(start):
    """The cells of each row of the one table of the appendices whose header begins with `start`."""
    [text] = [text for path in APPENDICES if f"\n{start}" in (text := path.read_text())]
    table = text[text.index(f"\n{start}") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in table[2:]]


def claim(number, words):
    """The row of claims.md with a number whose statement begins with the words."""
    lines = CLAIMS.partition("## All rows")[2].splitlines()
    [line] = [line for line in lines if line.startswith(f"| {number} | {words}")]
    return line


def numbers(number, words, pattern):
    """The numbers in a row of claims.md, where the pattern's groups match."""
    return [float(text) for text in re.search(pattern, claim(number, words)).groups()]


def words_of(name):
    """The text of an appendix in one line."""
    return " ".join((RESULTS / f"{name}.md").read_text().split())


def in_words(mean, low, high):
    """`2.5 points (1.2 to 3.8)`."""
    return f"{mean:.1f} points ({low:.1f} to {high:.1f})"


@pytest.fixture(scope="module")
def scores():
    """A function: mean R@1 of a study's runs with these settings, in %, by its archive."""
    tables = {}

    def mean(study, **settings):
        if study not in tables:
            runs = load_runs(RESULTS / study)
            scored = measures.with_scores(runs, measures.named_heads(runs)).set_index("run")
            tables[study] = runs.runs.set_index("run").assign(recall=scored["recall"])
        part = tables[study]
        for key, value in settings.items():
            column = part[key.replace("__", ".")]
            part = part[column.isna() if value is None else column == value]
        assert len(part) >= 3
        return part["recall"].mean()

    return mean


def test_the_page_is_short_and_has_the_twelve_verdicts_of_the_claims():
    assert len(LINES) <= 200
    table = CLAIMS[CLAIMS.index("| | the paper's claim") :].partition("\n\n")[0].splitlines()
    assert len(table) == 2 + 12
    at = LINES.index(table[0])
    assert LINES[at : at + len(table) + 1] == [*table, ""]
    section = (ROOT / "README.md").read_text().partition("## Results so far\n\n")[2]
    assert len(section.partition("\n\n## ")[0].splitlines()) <= 12


@pytest.mark.parametrize("page", ["README.md", "GUIDE.md", "RESULTS.md", "PROTOCOL.md"])
def test_pages_say_that_a_claim_beyond_the_twelve_is_not_judged(page):
    for line in (ROOT / "experiments" / page).read_text().splitlines():
        assert not re.search(r"\bC1[3-9]\b", line) or "not judged" in line, line


def test_the_rows_of_the_appendix_are_those_of_the_claims():
    lines = CLAIMS.partition("## All rows")[2].splitlines()
    claims = [[cell.strip() for cell in line.split(" | ")] for line in lines if "| C" in line[:4]]
    judged = [(c[0].strip("| "), c[1], re.match(r"\*\*(.*?)\*\*", c[5])[1]) for c in claims]
    ours = [tuple(cells[:3]) for cells in rows_of("| | claim | verdict |")]
    own = [row for row in ours if row[0] == "C4"]
    assert [row[2] for row in own] == ["not judged"]
    assert [row for row in ours if row not in own] == [row for row in judged if row[2] != "no runs"]


INTERVAL = r"mini L ([+-][\d.]+) \[([+-][\d.]+), ([+-][\d.]+)\]"


def test_the_messages_have_the_numbers_of_the_claims(scores):
    both = r"([\d.]+)% of the time \(\d.*?; ([\d.]+)% of the time \(\d"
    saved = numbers("C7", "SwitchBack is faster", both)
    assert f"saves {saved[0]:.1f}% of the time of ViT-H/14's forward" in PAGE
    assert f"saves {saved[0]:.0f}% of ViT-H/14's forward" in README
    assert f"{saved[0]:.1f}% of forward and backward saved, {saved[1]:.1f}% with" in PAGE
    mean, low, high = numbers("C1", "SwitchBack int8 matches bf16's accuracy, mini", INTERVAL)
    interval = f"ends {-mean:.1f} points below bf16 ({-low:.1f} below to {high:.1f} above)"
    assert interval in PAGE and f"ends {-mean:.1f} points" in README
    alone = numbers("C6", "the weight gradient alone in int8 costs", INTERVAL)
    assert f"it alone costs {in_words(*alone)}" in PAGE
    assert f"products, alone costs {alone[0]:.1f} points" in README
    loses = numbers("C2", "LLM.int8() training loses accuracy, mini", INTERVAL)
    assert "loses {:.1f} points in `mini_l` ({:.1f} to {:.1f})".format(*loses) in PAGE
    per_run = r"StableAdamW: ([\d.]+); AdamW: ([\d.]+); .*?\((\d+) runs"
    stable, adamw, num = numbers("C11", "loss spikes over 1 nat are rarer", per_run)
    words = f"In {num / 2:.0f} runs each, it has {stable * num / 2:.0f} spikes over 1 nat where "
    assert f"{words}AdamW has {adamw * num / 2:.0f}" in PAGE
    assert f"{stable * num / 2:.0f} large spikes where AdamW has {adamw * num / 2:.0f}" in README
    half = scores("spikes_vs_lr_mini", optimizer__lr=1e-3)
    settings = {"optimizer__name": "adamw", "optimizer__beta2": 0.99}
    full = scores("stability_mini", **settings)
    assert f"half the rate, AdamW ends at {half:.1f}% R@1 instead of {full:.1f}%" in PAGE
    assert f"{half:.0f}% instead of {full:.0f}%" in README
    stable = scores("stability_mini", optimizer__name="stable_adamw", optimizer__beta2=0.99)
    assert f"{half - stable:.1f} points above StableAdamW at the same beta2" in PAGE
    assert f"StableAdamW reaches {stable:.0f}% at the full rate" in README


def test_leads_and_lower_values_of_beta2_are_those_of_the_claims():
    pattern = (
        r"(\d+) of (\d+) follow .*? a further (\d+) .*? "
        r"of (\d+) spikes over 1 nat, (\d+) follow and (\d+)"
    )
    follow, total, same, large, *of_large = numbers("C10", "a loss spike follows", pattern)
    assert f"fails at {follow / total:.0%} (required: 80%; paper: 93%)" in PAGE
    assert f"A further {same / total:.0%} are detected at the very step" in PAGE
    assert f"with them, it is {(follow + same) / total:.0%}" in PAGE
    assert f"Of {large:.0f} spikes over 1 nat, {of_large[0]:.0f} are detected 1 to 8 steps" in PAGE
    assert f"patch embedding and {of_large[1]:.0f} at its very step" in PAGE
    spikes = words_of("spikes")
    assert f"Of our {total:.0f} loss spikes, {follow:.0f} do ({follow / total:.0%})" in spikes
    assert f"A further {same:.0f} are detected at the very step" in spikes
    low = numbers("C11", "a beta2 that is too low costs accuracy, mini", INTERVAL)
    assert f"A beta2 of 0.5 costs {in_words(*low)}" in PAGE


@pytest.mark.slow
def test_ties_decide_whether_spikes_grow_with_the_learning_rate():
    roots = [RESULTS / "stability_mini", RESULTS / "spikes_vs_lr_mini"]
    counts = evidence.Evidence(roots).spikes(("spikes_vs_lr", "stability"))
    counts = counts[(counts["optimizer.name"] == "adamw") & (counts["optimizer.beta2"] == 0.99)]
    by_seed = counts.pivot_table(evidence.SPIKES, "seed", "optimizer.lr")
    p_value, text = permuted(by_seed.to_numpy()), words_of("spikes")
    assert f"the learning rate's is {p_value:.3f}, or {3 * p_value:.3f} after" in text
    [scipys] = numbers("C9", "loss spikes grow with the learning rate", r"([\d.]+) by Holm")
    assert evidence.page(by_seed) > p_value and scipys > evidence.ALPHA > 3 * p_value


@pytest.fixture(scope="module")
def everything():
    """All runs of the records."""
    return load_all(RESULTS)


@pytest.mark.slow
def test_features_by_recipe_are_those_of_the_records(everything):
    studies = feature_size.studies
    frame = feature_size.query(everything.where(everything.summaries["experiment"].isin(studies)))
    frame = frame[(frame["model"] == "mini_l") & (frame["recipe"] != "bf16")]
    text = words_of("features")
    last = frame[frame["at"] == "last"].groupby("recipe")["ratio"].mean()
    assert f"is {last['LLM.int8()']:.2f} times that of the bf16 run" in text
    assert f"and {last['int8 weight gradient only']:.2f} times with the weight gradient" in text
    assert f"SwitchBack int8 has {last['SwitchBack int8']:.2f}" in text
    assert f"SwitchBack int8 at {last['SwitchBack int8']:.2f}" in PAGE
    inflated = frame["recipe"].isin(["LLM.int8()", "int8 weight gradient only"])
    ends, starts = (frame[frame["at"] == at] for at in ("last", "early"))
    own, others = ends.loc[inflated, "ratio"], ends.loc[~inflated, "ratio"]
    words = f"These {len(own)} runs ({own.min():.2f} to {own.max():.2f}) separate wholly from "
    assert f"{words}{len(others)} others ({others.min():.2f} to {others.max():.2f})" in text
    assert f"{len(own)} runs lie between {own.min():.1f} and {own.max():.1f}" in PAGE
    early = starts.loc[inflated, "ratio"]
    rest = starts.loc[~inflated & (starts["recipe"] != "e2m1 weight gradient only"), "ratio"]
    words = f"the {len(early)} runs are at {early.min():.2f} to {early.max():.2f} and all others "
    assert f"{words}at {rest.min():.2f} to {rest.max():.2f}" in text


@pytest.mark.slow
def test_attention_logits_are_those_of_the_records(everything):
    studies = attention_logits.studies
    runs = everything.where(everything.summaries["experiment"].isin(studies))
    frame = attention_logits.query(runs)
    over_runs = stats.spearmanr(frame["logit_max"], frame["recall"]).statistic
    assert f"correlation {over_runs:.2f} over {len(frame)} runs" in PAGE
    ranks = frame.groupby("setting")[["logit_max", "recall"]].rank()
    ranks -= ranks.groupby(frame["setting"]).transform("mean")
    assert f"(within a setting: {ranks.corr().iloc[0, 1]:.2f})" in PAGE


@pytest.mark.slow
def test_pairs_of_runs_that_show_equality_are_those_of_the_records(everything):
    at = everything.summaries
    is_its = at["experiment"].isin(rounding.studies) & (at["scale"] == "mini")
    frame = rounding.query(everything.where(is_its))
    alone = frame[frame["arm"] == "rounding alone"]
    recall, loss = alone[["recall", "validation_loss"]].std()
    loss *= 100 / alone["validation_loss"].mean()
    pairs = [pairs_needed(*each) for each in ((recall, 0.5), (loss, 1), (recall, paper.EQUAL))]
    text = words_of("repeatability")
    assert f"{recall:.2f} points (" in text and f"{loss:.1f}% of the validation loss" in text
    assert f"{pairs[0]} pairs of runs with this deviation" in text
    assert f"{pairs[1]} for 1% of the validation loss, and {pairs[2]} for the paper's" in text


def pairs_needed(deviation, margin, power=0.8):
    """Pairs of runs by which two one-sided tests at 5% show equality of equal methods."""
    ratio = margin / (math.sqrt(2) * deviation)
    nums = np.arange(2, int(20 / ratio**2) + 20)
    most = stats.t.ppf(0.95, nums - 1)
    reached = 2 * stats.t.cdf(ratio * np.sqrt(nums) - most, nums - 1) - 1
    return nums[reached >= power][0]


@pytest.fixture(scope="module")
def sized(everything):
    """Runs and frame of `recipes_by_size`, at 5e-4."""
    return with_scores(everything, "weight_gradient")


@pytest.fixture(scope="module")
def equal(everything):
    """The same of `equality_true_size`."""
    return with_scores(everything, "equality")


def with_scores(everything, study):
    """Runs of a study at true size, and their frame of `recipes_by_size` with scores, by seed."""
    at = everything.summaries
    runs = everything.where((at["scale"] == "true_size") & (at["experiment"] == study))
    heads = measures.with_scores(runs, measures.named_heads(runs)).set_index("run")
    frame = recipes_by_size.query(runs).sort_values("seed")
    frame = frame.assign(ms=frame["run"].map(runs.timing.groupby("run")["step_ms"].median()))
    return runs, frame.join(heads[["validation_loss", "recall"]], on="run")


@pytest.mark.slow
def test_runs_at_true_size_are_those_of_the_records(sized):
    runs, frame = sized
    model, recipes = "", {naming.precision(name): name for name in set(frame["recipe"])}
    models = {naming.model(name): name for name in set(frame["model"])}
    rows = [cells[:7] for cells in rows_of("| size | recipe | validation loss |")]
    assert len(rows) == 15
    for name, recipe, *numbers in rows:
        model = models.get(name, model)
        part = frame[(frame["model"] == model) & (frame["recipe"] == recipes[recipe])]
        block = paper.BLOCK.format(LAST[model])
        blocks = [runs.only(run).series(block, "feature_mean") for run in part["run"]]
        columns = (
            (part["validation_loss"], "{:.4f}"),
            (part["recall"], "{:.1f}"),
            ([values.get(300) for values in blocks], "{:.1f}"),
            ([values.iloc[-1] for values in blocks], "{:.1f}"),
            (part["ms"], "{:.0f}"),
        )
        assert numbers == [", ".join(map(text.format, values)) for values, text in columns]


LAST = {"vit_b14": 11, "vit_l14": 23, "vit_h14": 31}  # last vision block


@pytest.mark.slow
def test_messages_at_true_size_are_those_of_the_records(sized):
    _, frame = sized
    means = frame.groupby(["model", "recipe"])[["loss_change", "feature_ratio", "ms"]].mean()
    of_h = means.loc["vit_h14", "loss_change"]
    low, high = -of_h["switchback"], -of_h["hw_fp8_tensorwise"]
    assert f"int8 ended {low:.1f}% below bf16 (two seeds)" in PAGE
    text = words_of("true_size")
    assert f"reach a validation loss {low:.1f}% and {high:.1f}% below bf16's" in text
    wide = frame[frame["recipe"].isin(["grad_weight int8", "llm_int8"])]["feature_ratio"]
    ratios = f"{wide.min():.1f} to {wide.max():.1f}"
    assert f"features of ViT-B, L and H {ratios} times as large by step 300" in PAGE
    assert f"features {ratios} times as large by step 300" in text
    ms = frame.set_index(["model", "recipe", "seed"])["ms"].sort_index()
    h14, l14 = (
        100 * (1 - ms[model, "switchback"] / ms[model, "bf16"]).mean()
        for model in ("vit_h14", "vit_l14")
    )
    assert f"saves {h14:.1f}% of a step of ViT-H/14 and {l14:.1f}% of ViT-L/14" in text


@pytest.mark.slow
def test_equality_at_true_size_is_that_of_the_records(equal):
    runs, frame = equal
    text, rows = words_of("true_size"), rows_of("| ViT-H/14 at 3.5e-4 |")
    frame, block = frame.set_index(["recipe", "seed"]), paper.BLOCK.format(LAST["vit_h14"])
    series = [runs.only(run).series(block, "feature_mean") for run in frame["run"]]
    frame["early"], frame["end"] = zip(*((one[300], one.iloc[-1]) for one in series), strict=True)
    recipes = {naming.precision(name): name for name in frame.index.unique("recipe")}
    assert {row[0] for row in rows} == set(recipes)
    for name, num, loss, change, recall, points, *others in rows:
        part = frame.loc[recipes[name]]
        assert (num, loss) == (str(len(part)), f"{part['validation_loss'].mean():.4f}")
        assert recall == f"{part['recall'].mean():.1f}"
        columns = {"early": "{:.1f}", "end": "{:.1f}", "ms": "{:.0f}"}
        assert others == [form.format(part[key].mean()) for key, form in columns.items()]
        if name == "bf16":
            assert change == points == ""
            continue
        logs = np.log(part["validation_loss"] / frame.loc["bf16", "validation_loss"]).dropna()
        in_percent = [100 * np.expm1(x) for x in interval(logs)]
        assert change == "{:+.1f} ({:.1f} to {:.1f})".format(*in_percent)
        differences = (part["recall"] - frame.loc["bf16", "recall"]).dropna()
        assert points == "{:+.2f} ({:.2f} to {:.2f})".format(*interval(differences))
    ratios = {
        (name, key): frame.loc[name, key] / frame.loc["bf16", key].reindex(frame.loc[name].index)
        for name in recipes.values()
        for key in ("early", "end", "ms")
    }
    spans = {key: f"{each.min():.2f} to {each.max():.2f}" for key, each in ratios.items()}
    llm, switchback, fp8 = "llm_int8", "switchback", "hw_fp8_tensorwise"
    assert f"LLM.int8() has {spans[llm, 'early']} times the features" in text
    early = (
        f"SwitchBack int8 {spans[switchback, 'early']} and tensor-wise fp8 {spans[fp8, 'early']}"
    )
    assert early in text
    ends = f"{spans[llm, 'end']}, {spans[switchback, 'end']} and {spans[fp8, 'end']} times"
    assert ends in text
    saved = 100 * (1 - ratios[switchback, "ms"])
    assert f"saves {saved.mean():.1f}% of a step ({saved.min():.1f}% to {saved.max():.1f}%)" in text
    assert f"and {saved.mean():.1f}% of a training step at 84 px on an H200" in PAGE
    assert f"LLM.int8() {100 * (1 - ratios[llm, 'ms'].mean()):.1f}%; fp8 takes " in text
    assert f"fp8 takes {100 * (ratios[fp8, 'ms'].mean() - 1):.1f}% longer" in text
    losses = np.log(frame["validation_loss"]).unstack(0)
    lost = [num_lost(losses.drop(index=seed)) for seed in losses.index]
    assert min(lost) == 1 and lost.count(2) == 4  # of two equalities
    assert (
        "at least one of the two equalities is lost, and both are lost in four of six cases" in text
    )
    means = frame.groupby("recipe")["recall"].mean()
    assert f"R@1 is {means['bf16']:.1f}% in bf16, {means[switchback]:.1f}% with Switch" in PAGE
    assert f"{means[fp8]:.1f}% with tensor-wise fp8 and {means[llm]:.1f}% with LLM.int8()" in PAGE


def num_lost(losses):
    """How many of the two equalities are not shown, by Holm's correction for four tests."""
    p_values = {
        (one, other): size_judges.p_value((losses[one] - losses[other]).dropna(), how)
        for (one, other), how in size_judges.FAMILY.items()
    }
    corrected = evidence.holm(p_values)
    equal = [pair for pair, how in size_judges.FAMILY.items() if how == size_judges.EQUAL]
    return sum(corrected[pair] >= evidence.ALPHA for pair in equal)


def test_messages_on_equality_are_those_of_the_claims():
    pattern = (
        r"ViT-H/14 ([+-][\d.]+) \[([+-][\d.]+), ([+-][\d.]+)\], \d seeds; ViT-H/14: p = ([\d.]+)"
    )
    own = numbers("C1", "SwitchBack int8 matches bf16's validation loss", pattern)
    fp8 = numbers("C3", "fp8 tensor-wise ends more than 3% above", pattern)
    llm = numbers("C2", "LLM.int8() has a higher validation loss", pattern)
    below = numbers("C1", "SwitchBack int8 has a lower validation loss", pattern)
    words = "ends {:.1f}% above bf16 (90%: {:.1f} below to {:.1f} above)"
    assert words.format(own[0], -own[1], own[2]) in PAGE
    assert f"{-fp8[0]:.1f}% below it ({-fp8[1]:.1f} below to {fp8[2]:.1f} above)" in PAGE
    assert "LLM.int8() ends {:.1f}% above ({:.1f} to {:.1f})".format(*llm[:3]) in PAGE
    assert f"int8, too, ends {llm[0]:.1f}% higher" in README
    assert f"narrowly (p = {own[3]:.3f})" in README
    text = words_of("true_size")
    assert own[3] == fp8[3] and f"(p = {own[3]:.3f} for both after the correction" in text
    assert f"rests on p = {own[3]:.3f} after Holm's correction" in PAGE
    assert f"than bf16 (p = {llm[3]:.3f})" in text and f"p = {below[3]:.3f})" in text
    exceeds = "exceeds by {:.1f}% ({:.1f} to {:.1f}".format(*below[:3])
    assert exceeds in text


def interval(values, level=0.9):
    """Mean and ends of Student's interval."""
    half = stats.sem(values) * stats.t.ppf((1 + level) / 2, len(values) - 1)
    return values.mean(), values.mean() - half, values.mean() + half


@pytest.fixture(scope="module")
def rates(everything):
    """Seed 1 of ViT-H/14 by recipe and learning rate: scores, excursions and sizes of features."""
    at = everything.summaries
    studies = at["experiment"].isin(["lr_map", "weight_gradient"])
    runs = everything.where((at["scale"] == "true_size") & studies & (at["seed"] == 1))
    scored = measures.with_scores(runs, measures.named_heads(runs)).set_index("run")
    heads = runs.runs.set_index("run").join(scored[["validation_loss", "recall"]])
    heads = heads[heads["model.name"] == "vit_h14"].reset_index()
    for row, run in enumerate(heads["run"]):
        loss = runs.only(run).metrics.set_index("step")["loss"]
        median = loss.rolling(21, center=True).median().loc[101:]
        features = runs.only(run).series(paper.BLOCK.format(LAST["vit_h14"]), "feature_mean")
        heads.loc[row, "excursion"] = (median - median.cummin()).max()
        heads.loc[row, ["early", "end"]] = features[300], features.iloc[-1]
        heads.loc[row, "at_150"] = loss.loc[145:155].median()
    heads = heads[heads["precision.label"] != "custom"]
    return heads.set_index(["precision.label", "optimizer.lr"])


@pytest.mark.slow
def test_table_of_learning_rates_is_that_of_the_records(rates):
    recipes = {naming.precision(name): name for name in rates.index.unique(0)}
    rows = rows_of("| learning rate | recipe (seed 1) |")
    for rate, recipe, *numbers in rows:
        cells = rates.loc[(recipes[recipe], float(rate)), list(COLUMNS)]
        assert numbers == list(map(str.format, COLUMNS.values(), cells)), (recipe, rate)
    assert len(rows) == len(rates) == 18


@pytest.mark.slow
def test_sentences_on_learning_rates_are_those_of_the_records(rates):
    loss, page = rates["validation_loss"].unstack(), words_of("true_size")
    assert (loss.idxmin(axis=1) == 3.5e-4).all()
    assert (rates["recall"].unstack().idxmax(axis=1) == 2.5e-4).all()
    change = (loss / loss.loc["bf16"] - 1).loc[["switchback", "hw_fp8_tensorwise", "llm_int8"]]
    for numbers in map(pd.Series.dropna, map(change.loc.__getitem__, change.index)):
        texts = [f"{number:+.1%}" for number in numbers]
        assert f"by {', '.join(texts[:-1])} and {texts[-1]}" in page
    steps = 1 - loss[3.5e-4] / loss[2.5e-4]
    assert f"the loss changes by {steps.min():.1%} to {steps.max():.1%}" in page
    above = loss - loss.loc["bf16"].min()
    assert (above.loc[:, :5e-4] <= 0.1).all(axis=None)
    assert above.loc[:, 7e-4:].stack().dropna().between(0.1, 1).all()
    bf16, *others = rates["excursion"].unstack()[1e-3].sort_values()
    assert f"is {bf16:.2f} nats, of the others {others[0]:.2f} to {others[-1]:.2f}" in page
    early, end = (rates[name].unstack() for name in ("early", "end"))
    early = early / early.loc["bf16"]
    of_llm = early.loc["llm_int8", :5e-4]
    assert f"has {of_llm.min():.1f} to {of_llm.max():.1f} times the features" in page
    at_1e_3 = early[1e-3]
    assert f"1e-3, it has {at_1e_3['llm_int8']:.1f} times" in page
    others = at_1e_3["switchback"], at_1e_3["hw_fp8_tensorwise"]
    assert "have {:.1f} and {:.1f} there".format(*others) in page
    llm, fp8 = (
        (end / end.loc["bf16"]).loc[name].dropna() for name in ("llm_int8", "hw_fp8_tensorwise")
    )
    assert "has {:.2f}, {:.2f}, {:.2f} and {:.2f} times".format(*llm) in page
    assert "fp8 {:.2f}, {:.2f}, {:.2f} and {:.2f}".format(*fp8) in page
    switchback = end.loc["switchback"] / end.loc["bf16"]
    low, high = switchback[:7e-4].min(), switchback[:7e-4].max()
    assert f"int8 {low:.2f} to {high:.2f} up to 7e-4 and {switchback[1e-3]:.2f} at 1e-3" in page
    at_150 = rates["at_150"].unstack()
    low, high = at_150.loc[:, :3.5e-4].stack().agg(["min", "max"])
    assert (
        f"step 150 (median of 11 steps) is {low:.1f} to {high:.1f} at the two lowest rates" in page
    )
    (at_7e_4,) = {f"{value:.1f}" for value in at_150[7e-4].dropna()}
    assert f"{at_7e_4} at 7e-4" in page
    assert f"{at_150[1e-3].min():.1f} to {at_150[1e-3].max():.1f} at 1e-3" in page
    bf16 = rates["recall"].loc["bf16"]
    assert f"reaches {bf16[2.5e-4]:.1f}% at 2.5e-4 instead of {bf16[5e-4]:.1f}% at 5e-4" in PAGE


COLUMNS = {
    "validation_loss": "{:.4f}",
    "recall": "{:.1f}",
    "excursion": "{:.2f}",
    "early": "{:.1f}",
    "end": "{:.1f}",
}


HORIZON = 8  # steps, the paper's


@pytest.mark.slow
def test_what_warnings_are_worth_is_that_of_the_records():
    own, *rest = (
        FIGURES["spike_warnings"].query(load_runs(RESULTS / study))
        for study in ("stability_mini", "stability_control", "optimizers_mini")
        + tuple(f"spikes_vs_{name}_mini" for name in ("lr", "batch", "size"))
    )
    others = pd.concat(rest)
    others = others[~others["run"].isin(own["run"])]
    shares = predictors.transferred(own)
    sums = own.groupby([*predictors.CELL, "threshold"])[list(predictors.COUNTS)].sum()
    f1 = pd.Series(predictors.shares_of(sums.to_numpy(float))[:, -1], sums.index)
    rows, lower = rows_of("| score | warnings that a spike follows"), []
    for score, (_, *cells) in zip(predictors.SCORES, rows, strict=True):
        samples = shares["detection", score, HORIZON]
        precision, by_chance, recall, recall_by_chance, f1_of_other_beta2 = samples[0]
        best = f1["detection", score, HORIZON].idxmax()
        keys = {"counted_from": "detection", "score": score, "horizon": HORIZON}
        at = (others[list(keys)] == pd.Series(keys)).all(axis=1) & (others["threshold"] == best)
        counts = others.loc[at, list(predictors.COUNTS)].to_numpy(float).sum(axis=0)
        from_onset = shares["onset", score, HORIZON][0, -1]
        elsewhere = predictors.shares_of(counts[None])[0, -1]
        expected = [f"{precision:.0%} ({by_chance:.1%})", f"{recall:.0%} ({recall_by_chance:.1%})"]
        assert cells == [
            *expected,
            *(f"{f:.2f}" for f in (f1_of_other_beta2, from_onset, elsewhere)),
        ], score
        difference = shares["detection", "rms", HORIZON][:, -1] - samples[:, -1]
        low, high = predictors.interval(difference[1:])
        lower.append(f"{difference[0]:.2f} ({low:.2f} to {high:.2f})")
    page = words_of("spikes")
    assert "the others is lower by {}, {} and {}".format(*lower[1:]) in page
    num_runs, num_spikes = others["run"].nunique(), counts[3]
    assert f"{num_runs} other runs of AdamW with {num_spikes:.0f} spikes" in page


def test_predictions_are_scored_as_in_the_claims():
    table = CLAIMS.partition("## Predictions")[2]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 5 and all(row in (RESULTS / "true_size.md").read_text() for row in rows)
    scores = [row.rpartition(" | ")[2].strip(" |").partition(":")[0] for row in rows]
    assert scores == ["true", "true", "false", "open", "open"]
    assert "Two came true (features), one did not" in PAGE and "Two are undecided." in PAGE


def test_the_records_stay_small():
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert len(files) <= 200 and sum(path.stat().st_size for path in files) <= 60e6


def test_accuracy_by_recipe_is_that_of_the_records(scores):
    model = ""
    for cells in rows_of("| model | recipe |"):
        model = cells[0].strip("`") or model
        if "float16" not in cells[1]:
            label = PRECISIONS[cells[1]]
            settings = {"model__name": model, "precision__label": label, "scaler__name": "none"}
            assert cells[2] == f"{scores('accuracy_vs_size_mini', **settings):.1f}%"
    for cells in rows_of("| recipe | mean R@1 |"):
        label = PRECISIONS[cells[0]]
        assert cells[1] == f"{scores('weight_gradient_mini', precision__label=label):.1f}%"


def test_accuracy_by_format_is_that_of_the_records(scores):
    for name, _, recall, *_ in rows_of("| format | bits |"):
        changes = name.startswith("NVFP4, from step 1,001")
        label = "nvfp4" if changes else PRECISIONS[name]
        settings = {"precision__label": label, "precision_change__step": 1001 if changes else None}
        assert recall == f"{scores('formats_mini', **settings):.1f}%"


def test_accuracy_by_optimizer_is_that_of_the_records(scores):
    for cells in rows_of("| optimizer | loss spikes in 3 runs |"):
        settings = {"optimizer__optim_bits": 32, "optimizer__on_warning__action": "none"}
        if cells[0] in WARNINGS:
            settings |= {"optimizer__name": "adamw"}
            settings["optimizer__on_warning__action"] = WARNINGS[cells[0]]
        elif "8 bits" in cells[0]:
            settings |= {"optimizer__name": "stable_adamw", "optimizer__optim_bits": 8}
        else:
            settings |= {"optimizer__name": OPTIMIZERS[cells[0]]}
        assert cells[7].startswith(f"{scores('optimizers_mini', **settings):.1f}% (")
    for cells in rows_of("| optimizer | beta2 |"):
        settings = {"optimizer__name": OPTIMIZERS[cells[0]], "optimizer__beta2": float(cells[1])}
        assert cells[7].startswith(f"{scores('stability_mini', **settings):.1f}% (")
