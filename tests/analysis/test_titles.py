"""Tests that titles state findings only where the runs that are drawn can show them."""

import itertools

import numpy as np
import pandas as pd
import pytest

from analysis import load_runs, measures, paper
from analysis.figures import FIGURES
from analysis.load import NoRunsError
from analysis.make import SPIKES, mark_of_runs
from analysis.measures import RECALL, VALIDATION_LOSS
from lowprec.config.schema import InterventionConfig
from tests.analysis.conftest import TENSORS, drawn, legend, spiking

STEPS = 400
OF_RUNS = sorted(slug for slug, figure in FIGURES.items() if not figure.lines)


@pytest.fixture
def own(make_run):
    """A function: makes a run of no study, with scores, features and spikes of loss and RMS_t."""

    def make(score=0.5, **keys):
        at = np.arange(1, STEPS + 1)
        rms = pd.DataFrame(np.where((at % 100 == 95)[:, None], 9.0, 1.0) * np.ones(3), at, TENSORS)
        blocks = pd.DataFrame({paper.BLOCK.format(i): score * at for i in range(4)}, at)
        tables = {"tensors": {"rms": rms, "grad_norm": rms}, "blocks": {"feature_mean": blocks}}
        columns = {name: np.full(STEPS, score) for name in (*RECALL, VALIDATION_LOSS)}
        columns |= {"grad_norm": np.ones(STEPS)}
        losses = spiking(STEPS, (100, 200, 300), height=2 + score) + score
        keys = {"num_steps": STEPS, "experiment": None, "scale": "mini", "losses": losses} | keys
        return make_run(tables=tables, columns=columns, **keys)

    return make


GRIDS = {
    "one run": [{}],
    "recipes": [{"recipe": "high"}, {"recipe": "llm_int8"}, {"recipe": "mxfp4"}],
    "optimizers": [
        {"optimizer": optimizer, "beta2": beta2}
        for optimizer, beta2 in itertools.product(["adamw", "stable_adamw"], [0.95, 0.99])
    ],
    "rates": [{"lr": lr, "recipe": r} for lr in (1e-3, 2e-3) for r in ("high", "switchback")],
    "changes": [{"intervention": InterventionConfig(n)} for n in ("none", "zero_init", "kq_norm")],
    "schedules": [{"beta2_decay": decay} for decay in (None, 0.5, 0.65)],
    "batches": [{"batch_size": size} for size in (128, 256)],
}


@pytest.mark.parametrize(
    "grid", [*GRIDS][:3] + [pytest.param(name, marks=pytest.mark.slow) for name in [*GRIDS][3:]]
)
def test_runs_of_one_seed_have_neutral_titles(own, tmp_path, grid):
    for i, keys in enumerate(GRIDS[grid]):
        own(0.5 + 0.1 * i, **keys)
    runs, num = load_runs(tmp_path / "runs"), 0
    for figure in map(FIGURES.get, OF_RUNS):
        try:
            frame = figure.query(runs)
        except NoRunsError:
            continue
        if len(frame):
            words, num = figure.words(frame).rstrip(","), num + 1
            assert figure.heading(frame) == words[0].upper() + words[1:]
    assert num > 9


def test_a_title_needs_seeds_that_agree_in_all_else_and_scatter_less_than_settings(own, query):
    formats, spikes = FIGURES["formats"], FIGURES["spike_heights"]
    by_seed = {0: 0.01, 1: 0.02, 2: -0.03}
    for seed, more in by_seed.items():
        own(0.7 + more, seed=seed)
        own(0.5 + more, seed=seed, recipe="llm_int8")
    frame = query(formats)
    assert formats.heading(frame) == "LLM.int8() has the lowest mean R@1"
    neutral = "Mean R@1 and validation loss"
    assert formats.heading(frame[frame["seed"] == 0]) == neutral
    assert measures.comparing("precision")(frame)
    assert not measures.comparing("precision")(frame[frame["seed"] == 0])
    assert formats.heading(frame[frame["precision"] == "bf16"]) == neutral
    scattered = frame.assign(recall=frame["recall"] + 20 * frame["seed"])
    assert formats.heading(scattered) == neutral
    is_narrow = frame["precision"] != "bf16"
    for key, value in {"lr": 1.0, "batch_size": 1, "state": "running"}.items():
        assert formats.heading(frame.assign(**{key: frame[key].mask(is_narrow, value)})) == neutral
    for seed, more in by_seed.items():
        own(0.8 + more, seed=seed, optimizer="stable_adamw")
    frame = query(spikes)
    frame = frame[frame["precision"] == "bf16"]
    assert spikes.heading(frame) == "StableAdamW ends highest: 80% mean R@1, AdamW 70%"
    worse = frame.assign(recall=100 - frame["recall"])  # AdamW ends highest
    assert spikes.heading(worse) == "Height of loss spikes and mean R@1"


def test_means_differ_only_if_those_of_every_part_do():
    frame = pd.DataFrame({"a": [0, 0, 0, 0, 1, 1, 1, 1], "b": [0, 0, 1, 1] * 2})
    for values, is_true in (
        ((1, 2, 9, 8, 8, 9, 2, 1), True),
        ((1, 2, 9, 8, 8, 9, 9, 8), False),
        ((1, 1, 1, 1, 8, 9, 2, 1), False),  # all are equal
        ((1, 2, 9, 8, np.nan, np.nan, 2, 1), True),  # one value of b is left
    ):
        assert measures.differ(frame.assign(x=values), "a", "b", value="x") == is_true


def test_titles_of_losses_need_a_control_and_equal_numbers_of_runs():
    of_runs = {"run": list("abcdef"), "seed": [0, 1] * 3, "model": "nano"}
    frame = pd.DataFrame(of_runs | {"precision": ["bf16"] * 2 + ["fp8_tensorwise"] * 4})
    frame["label"] = ["bf16"] * 2 + ["no change"] * 2 + ["KQ layer norm"] * 2
    frame["optimizer"] = "adamw"
    title = FIGURES["fp8_fixes"].title
    best = "KQ layer norm helps most: loss 2.0 at the end, 1.0 in bf16"
    assert title(frame.assign(loss=[1, 1, 4, 4, 2, 2])) == best
    assert title(frame.assign(loss=[1, 1, 4, 4, 2, 4.5])) == ""  # a run without a change is lower
    mixed = frame.assign(loss=[1, 1, 4, 4, 2, 2], optimizer=["adamw", "stable_adamw"] * 3)
    assert title(mixed) == ""
    frame = frame.assign(beta2_decay=np.nan, height=2.0, loss=1.0, lr=[1, 1, 2, 2, 3, 3])
    assert FIGURES["beta2_schedule"].title(frame) == ""  # constants alone
    rates = FIGURES["spikes_vs_lr"].title
    assert rates(frame).endswith("at higher learning rates: 2, 2 and 2")
    assert rates(frame[1:]) == rates(frame.assign(height=0.5)) == ""
    frame = pd.DataFrame({"product": ["output", "weight"], "format": "int8", "recall": [1, 2]})
    assert FIGURES["one_product"].title(frame) == ""  # no input gradient


def test_methods_in_the_panels_of_a_schedule_are_told_apart(own, query):
    schedule = FIGURES["beta2_schedule"]
    for optimizer in ("adamw", "stable_adamw"):
        own(optimizer=optimizer)
    titles = [title.partition("\n")[0] for title, _ in schedule.parts(query(schedule))]
    assert sorted(titles) == [
        f"beta2 = 0.99, bf16, {name}, 1 run" for name in ("AdamW", "StableAdamW")
    ]


def test_fixes_have_a_panel_for_each_format_and_name_optimizers_that_differ(own, query):
    fixes = FIGURES["fp8_fixes"]
    own()
    own(optimizer="stable_adamw")
    [ax] = drawn(fixes, query(fixes))
    assert ax.get_title() == "nano, bf16"
    assert sorted(legend(ax)) == ["AdamW", "StableAdamW"]
    own(recipe="llm_int8")
    own(recipe="mxfp4")
    own(intervention=InterventionConfig("kq_norm"))
    titles = [ax.get_title() for ax in drawn(fixes, query(fixes))]
    assert titles == ["nano, LLM.int8() and bf16", "nano, MXFP4 and bf16", "nano, bf16"]


def test_interventions_show_runs_in_16_bits_alone(own, query):
    for lr in (1e-3, 2e-3):
        own(lr=lr)
        own(lr=lr, recipe="llm_int8")
    frame = query(FIGURES["interventions"])
    assert set(frame["precision"]) == {"bf16"} and len(frame) == 2
    assert drawn(FIGURES["interventions"], frame)[0].get_title() == "nano, bf16"


def test_losses_of_one_rate_stand_in_rows_of_their_model(own, query):
    for recipe, model in itertools.product(["high", "llm_int8"], ["nano", "mini_b"]):
        own(recipe=recipe, model=model)
    _, right, *_ = drawn(FIGURES["rate_map"], query(FIGURES["rate_map"]))
    names = [text.get_text() for text in right.figure.axes[0].get_yticklabels()]
    assert [name for name in names if name not in ("bf16", "LLM.int8()")] == ["nano", "mini_b"]
    assert "none" not in [text.get_text() for text in right.texts]  # all have a loss


def test_runs_that_are_too_short_for_spikes_mark_figures_of_spikes(make_run, tmp_path):
    make_run(num_steps=50)
    make_run(num_steps=400)
    runs = load_runs(tmp_path / "runs")
    assert mark_of_runs(runs.runs, has_spikes=True) == "1 of 2 runs too short for loss spikes"
    assert mark_of_runs(runs.runs) == ""
    names = ("spikes_vs_lr", "rms_and_loss", "kq_norm", "loss_curves")
    shows = [not SPIKES.isdisjoint(FIGURES[name].query(runs)) for name in names]
    assert shows == [True, True, True, False]


@pytest.mark.parametrize("slug", ["update_clipping", "lead_histogram", "rounding"])
def test_a_figure_without_anything_to_show_is_not_drawn(make_run, query, slug):
    scores = {name: np.full(20, 0.5) for name in RECALL}
    make_run(num_steps=20, experiment=None, state="failed", columns=scores)
    with pytest.raises(NoRunsError, match="no run "):
        drawn(FIGURES[slug], query(FIGURES[slug]))


def test_a_tensor_is_named_first_only_if_more_spikes_follow_than_by_chance():
    frame = pd.DataFrame({"run": ["a", "b"], "tensor": TENSORS[0], "num_loss_spikes": 20})
    frame = frame.assign(num_rms_spikes=9, num_first=3, num_following=15)
    title = FIGURES["tensors_before_spikes"].title
    first = "Patch embedding first: 30 of 40 loss spikes follow one of its RMS spikes"
    assert title(frame.assign(expected=2)) == first
    assert title(frame.assign(expected=14)) == ""


@pytest.mark.parametrize(("costly", "few"), [("llm_int8", False), ("switchback", True)])
def test_the_headline_names_the_costliest_of_several_recipes(costly, few):
    rates = {"model": "vit_h14", "lr": [1e-3, 1e-3, 2e-3, 2e-3], "seed": [0, 1, 0, 1]}
    bf16 = pd.DataFrame(rates | {"precision": "bf16", "loss_change": 0.0})
    bf16["validation_loss"] = [1, 1, 1.2, 1.2]
    others = [bf16[:2].assign(precision=costly, loss_change=4.4)]
    others += [] if few else [bf16[:2].assign(precision="switchback", loss_change=1.0)]
    frame = pd.concat([bf16, *others], ignore_index=True)
    frame = frame.assign(recipe=frame["precision"], counts=frame["lr"] == 1e-3, recall_change=0)
    settings = {key: 0 for key in measures.COMPARED if key not in frame} | {"state": "finished"}
    frame, headline = frame.assign(**settings), FIGURES["headline"]
    title = headline.heading(frame)
    assert "is 1.2 times as high at 2e-3 as at 1e-3" in title
    assert ("the costliest recipe" in title) == (not few)
    for lacking in (frame[frame["seed"] == 0], frame[(frame["lr"] == 1e-3) | (frame["seed"] == 0)]):
        assert headline.heading(lacking).startswith("Validation loss by learning rate")
