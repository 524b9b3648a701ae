"""What pages say of runs at mini scale and of their records agrees with the committed records."""

import json
import math
import zipfile

import pytest

from analysis import measures
from analysis.bench import load_lines
from analysis.figures import FIGURES, feature_size
from tests.analysis.results import PAGE, RESULTS, ROOT, rows_of, words_of
from tests.analysis.test_results_page import OPTIMIZERS, WARNINGS

GUIDE = " ".join((ROOT / "experiments" / "GUIDE.md").read_text().split())
RECORDS = (RESULTS / "README.md").read_text()
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
           "eleven", "twelve", "thirteen")  # fmt: skip


@pytest.fixture(scope="module")
def mini(everything):
    """The runs of studies at mini scale."""
    at = everything.summaries
    return everything.where((at["scale"] == "mini") & at["experiment"].notna())


@pytest.mark.slow
def test_runs_that_end_at_chance_are_those_of_the_records(mini):
    heads, found = mini.runs.set_index("run"), []
    for run, loss in mini.metrics.groupby("run")["loss"]:
        head, chance = heads.loc[run], math.log(heads.loc[run, "batch_size"])
        if abs(loss.iloc[-20:].median() - chance) < 0.02 * chance:
            found.append((head["experiment"], head["optimizer.name"], head["optimizer.beta2"]))
    found.sort()
    studies = ["early_warnings", "early_warnings", "kq_norm", "stability"]
    assert [study for study, *_ in found] == studies
    assert {optimizer for _, optimizer, _ in found} == {"adamw"}
    low, high, *last = (beta2 for *_, beta2 in found)
    assert last == [0.999, 0.999]
    words = f"`kq_norm_mini` (beta2 0.999) and two of `early_warnings_mini` ({low:g} and "
    text = words_of("method")
    assert f"{NUMBERS[len(found)].capitalize()} runs of AdamW end at chance" in text
    assert f"{words}{high:g})" in text


def test_studies_of_several_versions_are_counted():
    num = 0
    for archive in RESULTS.glob("*_mini"):
        commits = set()
        for path in archive.rglob("*.zip"):
            with zipfile.ZipFile(path) as file:
                names = [name for name in file.namelist() if name.endswith("environment.json")]
                commits |= {json.loads(file.read(name))["commit"] for name in names}
        num += len(commits) > 1
    assert f"the runs of {NUMBERS[num]} mini studies were trained with several" in words_of(
        "method"
    )
    assert f"| {NUMBERS[num]} mini studies, `formats_mini` among them |" in RECORDS


def test_hours_at_the_papers_scale_are_those_of_passes_with_checkpointing():
    lines = load_lines(RESULTS, "model")
    lines = lines[lines["shape"] == "vit_h14 batch 256, checkpointing"].set_index("case")["rate"]
    rates = lines["switchback"], lines["high"]
    int8, high = (f"{20_000 * 16_384 / rate / 3600:.0f}" for rate in rates)
    text = words_of("method")
    assert "measured at {:.0f} (SwitchBack int8) and {:.0f} images/s".format(*rates) in text
    assert f"takes at least {int8} and {high} H100-hours" in text
    assert f"takes at least {high} / {int8} H100-hours" in GUIDE


@pytest.mark.slow
def test_gradients_by_depth_are_those_of_the_records(mini):
    runs = mini.where(mini.summaries["experiment"] == "gradient_magnitude")
    frame = FIGURES["gradient_magnitude"].query(runs)
    means = frame[frame["step"] > 1800].groupby(["run", "block"])["gradient"].mean()
    ratios = means.groupby("run").first() / means.groupby("run").last()
    changed = runs.runs.set_index("run")["intervention.name"] == "zero_init"
    (low, high), (least, most) = (
        (part.min(), part.max()) for _, part in ratios.groupby(changed.reindex(ratios.index))
    )
    text = words_of("features")
    assert f"is {low:.0f} to {high:.0f} times as large in the first block" in text
    assert f"With zero-init, it is {least:.1f} to {most:.1f} times as large" in text


def ends(runs):
    """`measures.named_heads` by run, with `size`, the last record of the last vision block."""
    heads = measures.named_heads(runs)
    columns = (*measures.OF_A_RUN, "step", "size")
    table = measures.by_run(
        runs, heads, columns, lambda run, head: measures.last_size(run, head, 1)
    )
    return heads.set_index("run").join(table.set_index("run")["size"])


@pytest.mark.slow
def test_features_that_the_figure_leaves_out_are_those_of_the_records(mini):
    at = mini.summaries
    drawn = feature_size.query(mini.where(at["experiment"].isin(feature_size.studies)))
    names = [*feature_size.studies, "fp8_fixes", "fp8_code_books"]
    table = ends(mini.where(at["experiment"].isin(names) & (at["model.name"] == "mini_l")))
    is_bf16 = table["precision"] == "bf16"
    bases = table[is_bf16 & (table["experiment"] == "accuracy_vs_size")].set_index("seed")["size"]
    rest = table[~table.index.isin(drawn["run"]) & ~is_bf16]
    ratios = rest["size"] / rest["seed"].map(bases).to_numpy()
    zero_init = rest["intervention"].where(rest["experiment"] == "fp8_fixes", "") == "zero_init"
    order = ("weight_gradient", "accuracy_vs_size", "fp8_code_books", "formats", "fp8_fixes")
    parts = [ratios[(rest["experiment"] == name) & ~zero_init] for name in order]
    parts.append(ratios[zero_init])
    assert sum(map(len, parts)) == len(rest)
    rows = rows_of("| in `mini_l` | runs |")
    said = [[f"{len(part)}", f"{part.min():.2f} to {part.max():.2f}"] for part in parts]
    assert [cells[1:] for cells in rows] == said
    int8, *_, narrow, _ = parts
    words = "Not drawn: {} in int8 at {:.1f} to {:.1f}, {} in 4 bits at {:.0f} to {:.0f}."
    values = [(NUMBERS[len(part)], part.min(), part.max()) for part in (int8, narrow)]
    assert words.format(*values[0], *values[1]) in PAGE
    shown = drawn[(drawn["at"] == "last") & (drawn["model"] == "mini_l")]
    shown = shown.loc[shown["recipe"].str.contains("LLM|int8 weight"), "ratio"]
    low, high = min(shown.min(), int8.min()), max(shown.max(), int8.max())
    words = (
        f"all {len(shown) + len(int8)} runs of `mini_l` with an int8 weight gradient with one scale"
    )
    assert f"{words} per row are at {low:.2f} to {high:.2f}, but" in words_of("features")
    blocks = ends(
        mini.where((at["experiment"] == "equality") & (at["precision.recipe"] != "switchback"))
    )
    sizes = blocks.set_index([blocks["precision"] == "bf16", "seed"])["size"]
    ratios = (sizes[False] / sizes[True]).dropna()
    span = f"{ratios.min():.2f} to {ratios.max():.2f}"
    words = f"{NUMBERS[len(ratios)]} runs of `equality_mini` have {span}."
    assert words in words_of("features")


@pytest.mark.slow
def test_features_of_8_bit_runs_with_other_settings_are_those_of_the_records(mini):
    at = mini.summaries
    names = ("spikes_vs_precision", "point_of_no_return", "real_images")
    table = ends(mini.where(at["experiment"].isin(names)))
    table["study"] = table["experiment"].replace("point_of_no_return", "spikes_vs_precision")
    keys, found = ["study", "optimizer", "seed"], {}
    sizes = table.set_index([*keys, "precision"])["size"].unstack()
    for study, part in sizes.groupby("study"):
        ratios = part.drop(columns="bf16").div(part["bf16"], axis=0)
        for recipe, column in ratios.items():
            found[study, recipe] = f"{column.min():.2f} to {column.max():.2f}"
    text = words_of("features")
    words = "`spikes_vs_precision_mini` has {} (SwitchBack int8) and {} (fp8 tensor-wise;"
    pair = (found["spikes_vs_precision", name] for name in ("switchback", "fp8_tensorwise"))
    assert words.format(*pair) in text
    assert f"`real_images_mini` has {found['real_images', 'switchback']} (SwitchBack" in text


@pytest.mark.slow
def test_loss_spikes_by_optimizer_are_those_of_the_records(mini):
    runs = mini.where(mini.summaries["experiment"] == "optimizers")
    frame = FIGURES["spike_heights"].query(runs)
    spikes, cells = frame[frame["part"] == "spikes"], {}
    for name, *row in rows_of("| optimizer | loss spikes in 3 runs |"):
        key = OPTIMIZERS.get(name, "stable_adamw_8bit")
        key = f"adamw_on_warning_{WARNINGS[name]}" if name in WARNINGS else key
        heights = spikes.loc[spikes["optimizer"] == key, "height"]
        assert row[:2] == [f"{len(heights)}", f"{(heights > 1).sum()}"], name
        highest = heights.max()
        assert row[2] in (f"{highest:.1f}", f"{highest:.2f}") if len(heights) else row[2] == "-"
        cells[name] = row
    at, without = cells["AdamW, beta2 0.9 at warnings"], cells["AdamW"]
    text = (
        f"the highest spike is {at[2]} instead of {without[2]} nats, {NUMBERS[int(at[1])]} spike "
    )
    assert f"{text}instead of {NUMBERS[int(without[1])]} exceeds 1 nat" in words_of("optimizers")
    assert f"highest spike {at[2]} instead of {without[2]} nats)" in PAGE
