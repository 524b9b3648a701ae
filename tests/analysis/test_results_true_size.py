"""What pages say of runs at true size agrees with the committed records."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from analysis import evidence, measures, naming, paper, run_files, size_judges, spike_marks
from analysis.figures import recipes_by_size
from lowprec.diagnostics.spikes import rms_spikes
from tests.analysis.results import PAGE, README, numbers, rows_of, words_of

LAST = {"vit_b14": 11, "vit_l14": 23, "vit_h14": 31}  # last vision block
COLUMNS = {
    "validation_loss": "{:.4f}",
    "recall": "{:.1f}",
    "excursion": "{:.2f}",
    "early": "{:.1f}",
    "end": "{:.1f}",
}


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
    for name, recipe, *found in rows:
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
        assert found == [", ".join(map(text.format, values)) for values, text in columns]


@pytest.mark.slow
def test_messages_at_true_size_are_those_of_the_records(sized):
    _, frame = sized
    means = frame.groupby(["model", "recipe"])[["loss_change", "feature_ratio", "ms"]].mean()
    of_h = means.loc["vit_h14", "loss_change"]
    low, high = -of_h["switchback"], -of_h["hw_fp8_tensorwise"]
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
    assert f"{-fp8[0]:.1f}% below it (90%: {-fp8[1]:.1f} below to {fp8[2]:.1f} above)" in PAGE
    assert "LLM.int8() ends {:.1f}% above (90%: {:.1f} to {:.1f})".format(*llm[:3]) in PAGE
    assert f"int8, it ends {llm[0]:.1f}% higher" in README
    assert f"narrowly (test of equality: p = {own[3]:.3f})" in README
    text = words_of("true_size")
    assert own[3] == fp8[3] and f"(p = {own[3]:.3f} for both after the correction" in text
    assert f"rests on p = {own[3]:.3f} after Holm's correction (0.095 if doubled" in PAGE
    assert 2 * own[3] == pytest.approx(0.095, abs=1.01e-3)  # of a rounded p
    assert f"than bf16 (p = {llm[3]:.3f})" in text and f"p = {below[3]:.3f})" in text
    exceeds = "exceeds by {:.1f}% ({:.1f} to {:.1f}".format(*below[:3])
    assert exceeds in text
    [needed] = numbers("C1", "SwitchBack int8 matches bf16's R@1", r"(\d+) seeds would decide it")
    assert f"(claims.md, by an upper limit of the deviation: {needed:.0f})" in text


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
    for rate, recipe, *found in rows:
        cells = rates.loc[(recipes[recipe], float(rate)), list(COLUMNS)]
        assert found == list(map(str.format, COLUMNS.values(), cells)), (recipe, rate)
    assert len(rows) == len(rates) == 24


@pytest.mark.slow
def test_sentences_on_learning_rates_are_those_of_the_records(rates):
    loss, page = rates["validation_loss"].unstack(), words_of("true_size")
    assert (loss.idxmin(axis=1) == 3.5e-4).all()
    assert (rates["recall"].unstack().idxmax(axis=1) == 2.5e-4).all()
    change = (loss / loss.loc["bf16"] - 1).loc[["switchback", "hw_fp8_tensorwise", "llm_int8"]]
    for _, shares in change.iterrows():
        texts = [f"{number:+.1%}" for number in shares]
        assert f"by {', '.join(texts[:-1])} and {texts[-1]}" in page
    steps = 1 - loss[3.5e-4] / loss[2.5e-4]
    assert f"the loss changes by {steps.min():.1%} to {steps.max():.1%}" in page
    above = loss - loss.loc["bf16"].min()
    assert (above.loc[:, :5e-4] <= 0.1).all(axis=None)
    assert above.loc[:, 7e-4:].stack().between(0.1, 1).all()
    bf16, *others = rates["excursion"].unstack()[1e-3].sort_values()
    assert f"is {bf16:.2f} nats, of the others {others[0]:.2f} to {others[-1]:.2f}" in page
    recipe, rate = rates["excursion"].idxmax()
    assert (recipe, rate) == ("hw_fp8_tensorwise", 1.4e-3)
    assert f"The largest, {rates['excursion'].max():.2f} nats, is that of fp8" in page
    trains = change.columns <= 5e-4
    assert (change.loc["llm_int8", trains] > 0).all() and (
        change.loc["llm_int8", ~trains] < 0
    ).all()
    early, end = (rates[name].unstack() for name in ("early", "end"))
    early = early / early.loc["bf16"]
    of_llm = early.loc["llm_int8", :5e-4]
    assert f"has {of_llm.min():.1f} to {of_llm.max():.1f} times the features" in page
    assert f"5e-4 and {early.loc['llm_int8', 7e-4]:.1f} times at 7e-4" in page
    at_1e_3 = early[1e-3]
    assert f"1e-3, it has {at_1e_3['llm_int8']:.1f} times" in page
    others = at_1e_3["switchback"], at_1e_3["hw_fp8_tensorwise"]
    assert "have {:.1f} and {:.1f} there".format(*others) in page
    llm, fp8 = (
        (end / end.loc["bf16"]).loc[name].dropna() for name in ("llm_int8", "hw_fp8_tensorwise")
    )
    listed = "{:.2f}, {:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f}"
    assert f"has {listed} times".format(*llm) in page
    assert f"fp8 {listed}".format(*fp8) in page
    switchback = end.loc["switchback"] / end.loc["bf16"]
    low, high = switchback[:7e-4].min(), switchback[:7e-4].max()
    highest = f"{switchback[1e-3]:.2f} at 1e-3 and {switchback[1.4e-3]:.2f} at 1.4e-3"
    assert f"int8 {low:.2f} to {high:.2f} up to 7e-4, {highest}" in page
    at_150 = rates["at_150"].unstack()
    low, high = at_150.loc[:, :3.5e-4].stack().agg(["min", "max"])
    assert (
        f"step 150 (median of 11 steps) is {low:.1f} to {high:.1f} at the two lowest rates" in page
    )
    low, high = at_150[7e-4].agg(["min", "max"])
    assert f"{low:.1f} to {high:.1f} at 7e-4" in page
    low, high = at_150.loc[:, 1e-3:].stack().agg(["min", "max"])
    assert f"{low:.1f} to {high:.1f} at 1e-3 and 1.4e-3" in page
    bf16 = rates["recall"].loc["bf16"]
    words = f"reaches {bf16[2.5e-4]:.1f}% at 2.5e-4 (one seed), {bf16[5e-4]:.1f}% at 5e-4 (two)"
    assert words in PAGE


@pytest.fixture(scope="module")
def changed(everything):
    """bf16 runs of ViT-H/14 by change of the model, learning rate and seed."""
    at = everything.summaries
    is_its = (at["scale"] == "true_size") & (at["model.name"] == "vit_h14")
    is_its &= at["experiment"] != "branches"  # its run repeats one of them
    is_its &= at["optimizer.lr"] != 1.4e-3  # no run with a change
    runs = everything.where(is_its & (at["precision.label"] == "bf16"))
    heads = measures.with_scores(runs, measures.named_heads(runs))
    for row, run in heads["run"].items():
        one = runs.only(run)
        loss = one.metrics.set_index("step")["loss"]
        median = loss.rolling(21, center=True).median().loc[101:]
        heads.loc[row, "excursion"] = (median - median.cummin()).max()
        heads.loc[row, "at_150"] = loss.loc[145:155].median()
        heads.loc[row, "logit"] = one.tensors("*resblocks.*", "logit_max").iloc[-1, 2:].max()
        features = one.series(paper.BLOCK.format(LAST["vit_h14"]), "feature_mean")
        heads.loc[row, ["begin", "end"]] = features[1], features[1500]
        first = one.series(paper.BLOCK.format(0), "feature_mean")
        heads.loc[row, "depth"] = features[1500] / first[1500]
        heads.loc[row, "ms"] = one.timing["step_ms"].median()
    above = heads["validation_loss"] - heads["validation_loss"].min()
    is_worse = [above <= size_judges.TRAINS, above < size_judges.FAILS]
    heads["outcome"] = np.select(is_worse, ["trains", "degraded"], "fails")
    heads = heads.assign(above=above, growth=heads["end"] / heads["begin"])
    return heads.set_index(["intervention", "lr", "seed"]).sort_index()


@pytest.mark.slow
def test_table_of_the_papers_rate_is_that_of_the_records(changed):
    columns = {"validation_loss": "{:.2f}", "recall": "{:.1f}", "outcome": "{}"}
    columns |= {"excursion": "{:.2f}", "begin": "{:.1f}", "end": "{:.1f}", "logit": "{:,.0f}"}
    names = {text: name for name, (text, _) in naming.INTERVENTIONS.items()}
    rows = rows_of("| learning rate | change (bf16) |")
    for rate, change, seed, *found in rows:
        cells = changed.loc[(names[change], float(rate), int(seed)), list(columns)]
        assert found == list(map(str.format, columns.values(), cells)), (rate, change, seed)
    at_high = changed[changed.index.get_level_values("lr") >= 1e-3]
    assert len(rows) == len(at_high) == 12
    span = "{:.1f} to {:.1f}".format(*at_high["at_150"].agg(["min", "max"]))
    assert f"12 runs learn: the loss at step 150 is {span} (chance: 6.9)" in words_of("true_size")


@pytest.mark.slow
def test_sentences_on_the_papers_rate_are_those_of_the_records(changed):
    page, high = words_of("true_size"), changed.loc[:, 1e-3:, :]
    kq, none, zero = (high.loc[name] for name in ("kq_norm", "none", "zero_init"))
    gains = [f"{gain:.1f}" for gain in kq["recall"] - none["recall"]]
    assert "by {} and {} points at 1e-3, by {} and {} at 2e-3".format(*gains) in page
    gains = [f"{gain:.1f}" for gain in zero["recall"] - none["recall"]]
    assert "R@1 is {} and {} points higher at 1e-3, and {} and {} at 2e-3".format(*gains) in page
    apart = zero["recall"].groupby("lr").agg(np.ptp)
    assert f"by up to {apart.max():.1f} points of R@1 (zero-init" in page
    by_rate = changed.loc["none", "recall"].groupby("lr").mean()
    assert f"The best of the 12 runs reaches {high['recall'].max():.1f}%" in page
    lower = f"reaches {by_rate[5e-4]:.1f}% at 5e-4 (two seeds), {by_rate[3.5e-4]:.1f}% at 3.5e-4"
    assert f"{lower} and {by_rate[2.5e-4]:.1f}% at 2.5e-4" in page
    above = pd.concat([kq, zero])["above"]
    assert f"they end {above.min():.2f} to {above.max():.2f} nats above the best bf16 run" in page
    text = "KQ layer norm takes {:.0f} to {:.0f} ms, one without a change {:.0f} to {:.0f}"
    ends = [*kq["ms"].agg(["min", "max"]), *none["ms"].agg(["min", "max"])]
    assert text.format(*ends) in page
    text = "attention logits end at {:.0f} to {:.0f} and features at {:.0f} to {:.0f}."
    ends = [*kq["logit"].agg(["min", "max"]), *kq["end"].agg(["min", "max"])]
    assert text.format(*ends) in page
    text = "features end at {:.1f} to {:.1f} and logits at {:,.0f} to {:,.0f};"
    ends = [*zero["end"].agg(["min", "max"]), *zero["logit"].agg(["min", "max"])]
    assert text.format(*ends) in page
    ends = none["logit"].agg(["min", "max"])
    assert "without a change, logits end at {:,.0f} to {:,.0f}".format(*ends) in page
    text = "become {:.2f} to {:.2f} times as large, without a change {:.0f} to {:.0f} times"
    ends = [*zero["growth"].agg(["min", "max"]), *none["growth"].agg(["min", "max"])]
    assert text.format(*ends) in page and none["growth"].idxmin() == (1e-3, 1)
    ends = changed.loc["none", "growth"][3.5e-4].agg(["min", "max"])
    assert "In bf16 at 3.5e-4, they become {:.1f} to {:.1f} times as large".format(*ends) in page
    text = "{:.2f} to {:.2f} times as large in the last block as in the first, where they reach"
    assert text.format(*none["depth"].agg(["min", "max"])) in page
    ends = (none["end"] / none["depth"]).agg(["min", "max"])
    assert "where they reach {:.0f} to {:.0f}.".format(*ends) in page
    at_half = {f"they are {depth:.1f} times as" for depth in changed.loc["none", "depth"][5e-4]}
    assert len(at_half) == 1 and at_half.pop() in page
    ends = "{:.2f} to {:.2f}".format(*zero["depth"].agg(["min", "max"]))
    assert f"With zero-init layer-scale, they are {ends} times as large" in page
    large = high["excursion"] > 0.5
    assert large.sum() == large.loc[["none", "zero_init"], 2e-3].sum() == 3
    assert f"but at most {high['recall'].max():.0f}%" in PAGE
    assert "norm reaches {:.0f}% and {:.0f}% R@1, not 60%".format(*kq["recall"][2e-3]) in PAGE


@pytest.mark.slow
def test_noise_of_weight_gradients_is_that_of_the_records(sized):
    runs, frame = sized
    [first] = frame.query("model == 'vit_h14' and recipe == 'bf16' and seed == 1")["run"]
    table, _ = run_files.read_row_file(runs.only(first).summaries.iloc[0].to_dict(), "quant_error")
    table = pd.DataFrame(table).query("product == 'grad_weight' and operand == 'g'")
    table = table[table["layer"].str.startswith("visual")].astype({"product_sqnr_db": float})
    keys, terms = ["recipe", "step", "inner_dim"], [1024, 4096, 9728]
    medians = table.groupby(keys)[["product_sqnr_db", "underflowed"]].median()
    ratio, zeros = (medians[name].unstack() for name in medians)
    page, three = words_of("true_size"), "{:.1f}, {:.1f} and {:.1f} dB"
    int8, fp8 = (ratio.loc[name, terms] for name in ("llm_int8", "fp8_tensorwise"))
    assert f"is {three} in sums of 1,024, 4,096 and 9,728 terms".format(*int8.loc[375]) in page
    assert f"tensor-wise fp8 {three}".format(*fp8.loc[375]) in page
    ends = int8.loc[1500, 9728], fp8.loc[1500, 9728]
    assert "At the end, they have {:.1f} and {:.1f} dB".format(*ends) in page
    shares = zeros.loc["llm_int8"]
    text = "rounds {:.0%}, {:.0%} and {:.0%} of the elements of the output gradient to 0 ({:.0%} at"
    assert text.format(*shares.loc[375, terms], shares.loc[1500, 9728]) in page


@pytest.mark.slow
def test_spikes_at_true_size_are_those_of_the_records(everything):
    at = everything.summaries
    runs = everything.where((at["scale"] == "true_size") & (at["experiment"] == "stability"))
    heads = measures.with_scores(runs, runs.summaries).set_index("run")
    expected, early = {}, []
    for name, head in heads.iterrows():
        protocol = spike_marks.protocol_of_run(head)
        series = spike_marks.read_series(runs.only(name), spike_marks.TENSOR)
        loss, rms = pd.Series(series.loss), series.rms_of(spike_marks.TENSOR)
        median = loss.rolling(21, center=True).median()[100:]
        spikes = spike_marks.spike_table(series, protocol)
        cells = [f"{one.step}, {one.height:.1f}" for one in spikes.itertuples()] or ["none"]
        num_rms = rms_spikes(rms, protocol).sum()
        cells += [f"{(median - median.cummin()).max():.2f}", str(num_rms)]
        cells += [f"{rms[100:].max():.1f}", f"{head['validation_loss']:.3f}"]
        key = tuple(head[["optimizer.name", "optimizer.lr", "optimizer.beta2"]])
        expected[key] = [*cells, f"{head['recall']:.1f}"]
        early.append(loss[149])
    names = {"AdamW": ("adamw", 5e-4), "StableAdamW": ("stable_adamw", 5e-4)}
    names["AdamW, learning rate 2.5e-4"] = ("adamw", 2.5e-4)
    names["AdamW, gradient norm clipped at 1.0"] = ("adamw_clip", 5e-4)
    rows = rows_of("| optimizer of ViT-L/14 | beta2 |")
    assert {(*names[name], float(beta2)): cells for name, beta2, *cells in rows} == expected
    ends = f"{min(early):.1f} to {max(early):.1f}"
    assert f"ten runs learn: the loss at step 150 is {ends}" in words_of("true_size")
