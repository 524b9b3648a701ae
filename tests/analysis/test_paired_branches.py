"""How far recipes part from bf16, from steps as `experiments.replay` writes them."""

import math

import numpy as np
import pandas as pd
import pytest

from analysis import load_runs, naming
from analysis.figures import branches, paired_branches
from experiments import compact
from tests.analysis.conftest import drawn, points
from tests.analysis.results import rows_of

BOOKS = "precision.recipe=custom precision.products={output: {format: e4m3_bnb}}"
NULLS = (-0.03, 0.01, 0.01, 0.01)  # log loss minus the control's, in the second half
SD = math.sqrt((0.03**2 + 3 * 0.01**2) / 4)  # of these and the control; the mean is 0
RECIPES = {"precision=switchback": 0.001, "precision=llm_int8": 0.2, BOOKS: -0.2}
WAVE = 0.001  # of the log loss; nine times as large in the last null
BOTH = (10, 110)  # states


def write_steps(run, after=10, nulls=NULLS, recipes=RECIPES, num=100):
    """Writes the steps of replays of a run from a state, as the command does."""
    at = np.arange(num)
    changes = [("recorded", math.nan, 0.0), ("control", math.nan, 0.0)]
    changes += [("perturbed", n, shift) for n, shift in enumerate(nulls, 1)]
    changes += [(change, math.nan, shift) for change, shift in recipes.items()]
    frames = []
    for change, perturbation, shift in changes:
        wave = 0 if change in ("recorded", "control") else WAVE * (9 if perturbation == 4 else 1)
        logs = np.where(at >= num // 2, shift, 0) + wave * (-1.0) ** at - 0.003 * at
        start = math.nan if change == "recorded" else after + 1
        facts = {"change": change, "perturbation": perturbation, "change_from": start}
        loss = 2 * np.exp(logs) + 0.004 * ((change == "recorded") & (at == 7))
        frames.append(pd.DataFrame({"step": after + 1 + at, "loss": loss, **facts}))
    (run / "replays").mkdir(exist_ok=True)
    name = run / "replays" / f"step_{after + 4}"
    pd.concat(frames).to_csv(f"{name}.csv", index=False)
    pd.DataFrame({"change": ["control"]}).to_csv(f"{name}_table.csv", index=False)


def cut(run, change, at, last):
    """Ends a replay of the second state some steps after it, with a loss."""
    path = run / "replays" / f"step_{BOTH[1] + 4}.csv"
    steps = pd.read_csv(path)
    own, step = steps["change"] == change, BOTH[1] + at
    steps.loc[own & (steps["step"] == step), "loss"] = last
    steps[~own | (steps["step"] <= step)].to_csv(path, index=False)


@pytest.fixture
def run(make_run):
    """A run with replays from two states."""
    run = make_run(num_steps=30, experiment="branches")
    for after in BOTH:
        write_steps(run, after)
    return run


def of(recipe, frame):
    """The rows of a recipe."""
    return frame[frame["recipe"] == recipe]


def outcome(recipe, run):
    """The outcome of a recipe in the figure's table, the same in its rows."""
    [found] = set(of(recipe, branches.query(load_runs(run)))["outcome"])
    return found


def test_differences_are_from_all_replays_in_bf16_in_the_second_half(run):
    frame = branches.query(load_runs(run))
    assert len(frame) == 2 * (1 + 4 + 3) and set(frame["after"]) == set(BOTH)
    llm = of("llm_int8", frame).iloc[0]
    assert llm["difference"] == pytest.approx(0.2)  # the mean of bf16 is 0, the median 0.01
    assert llm["error"] == pytest.approx(SD * math.sqrt(1 + 1 / 5)) and llm["num_bf16"] == 5
    low, high = paired_branches.interval(of("llm_int8", frame), 0.95)
    assert (high - low).iloc[0] / 2 == pytest.approx(3.0414 * SD, rel=1e-4)
    assert of("bf16", frame)["difference"].sum() == pytest.approx(0, abs=1e-12)
    assert set(of("bf16", frame)["outcome"]) == {""}
    scatter = WAVE * math.sqrt(50 / 49)  # without the trend, which the control has, too
    assert llm["scatter"] == pytest.approx(scatter) and frame["control_off"].max() < 0.00401
    assert frame["bf16_scatter"].to_numpy() == pytest.approx(scatter)
    assert frame["control_off"].to_numpy() == pytest.approx(0.004)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "differs"),
        ({"recipes": {"precision=llm_int8": -0.2}}, "undecided"),  # on the other side
        ({"recipes": {"precision=llm_int8": 0.045}}, "undecided"),  # by 90%, it differs
        ({"recipes": {"precision=llm_int8": 0.054}}, "differs"),
        ({"nulls": (math.inf,) + NULLS[1:]}, "undecided"),
        ({"nulls": (-0.01, 0.01)}, "undecided"),
        ({"num": 99}, "undecided"),
    ],
)
def test_a_recipe_differs_only_if_both_states_agree(run, change, expected):
    write_steps(run, BOTH[1], **change)
    assert outcome("llm_int8", run) == expected


def test_a_recipe_has_no_outcome_without_both_states(run):
    frame = branches.query(load_runs(run))
    assert paired_branches.outcome(frame[:0]) == "undecided"
    (run / "replays" / f"step_{BOTH[1] + 4}.csv").unlink()
    assert outcome("llm_int8", run) == "undecided"
    for after in BOTH:
        write_steps(run, after, num=40)
    assert outcome("llm_int8", run) == "undecided"


@pytest.mark.parametrize(
    ("change", "last", "expected", "at"),
    [
        ("precision=llm_int8", math.inf, "diverges", 30),
        ("precision=llm_int8", math.nan, "diverges", 70),  # in the half that is compared
        ("precision=llm_int8", 2.0, "undecided", 30),
        ("precision=llm_int8", 2.0, "undecided", 70),
        ("perturbed", math.inf, "undecided", 70),
        ("control", 2.0, "undecided", 70),
    ],
)
def test_a_replay_diverges_only_by_a_loss_that_is_not_finite(run, change, last, expected, at):
    cut(run, change, at, last)
    assert outcome("llm_int8", run) == expected
    cut(run, "perturbed", at, 2.0)
    assert outcome("llm_int8", run) == "undecided"


def test_replays_with_a_later_change_do_not_count(run):
    expected = branches.query(load_runs(run))
    path = run / "replays" / f"step_{BOTH[0] + 4}.csv"
    steps = pd.read_csv(path)
    later = steps[(steps["step"] > 80) & steps["change_from"].notna()]
    later = later.assign(change_from=81, loss=9.0)
    pd.concat([steps, later, later.assign(change="unchanged")]).to_csv(path, index=False)
    pd.testing.assert_frame_equal(branches.query(load_runs(run)), expected)


@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (0.0, "equal within 3%"),  # by 95%, undecided
        (0.0035, "equal within 3%"),
        (0.0045, "undecided"),
        (-0.0035, "equal within 3%"),
        (-0.0045, "undecided"),
    ],
)
def test_a_recipe_is_equal_if_both_90_intervals_are_within_3_percent(run, shift, expected):
    nulls = [0.011 / SD * null for null in NULLS]  # 0.0257 to either side
    for after, of_state in zip(BOTH, (0.0, shift), strict=True):
        write_steps(run, after, nulls, {"precision=switchback": of_state})
    assert outcome("switchback", run) == expected


def test_a_recipe_has_an_outcome_only_if_the_nulls_vary_half_as_much(run):
    rows = of("llm_int8", branches.query(load_runs(run)))
    for ratio, expected in ((0.51, "differs"), (0.49, "undecided")):
        scatter = rows["scatter"] * np.array([1.0, ratio])
        assert paired_branches.outcome(rows.assign(bf16_scatter=scatter)) == expected


def test_steps_survive_compaction_and_a_figure_shows_each_replay(run, tmp_path):
    (run / "replays" / "step_9.csv").write_text("change,step\n")
    out = tmp_path / "archive" / "runs.zip"
    compact.main(compact.CompactConfig(run=str(run), out=str(out)))
    with pytest.warns(UserWarning, match="step_9.csv: left out"):
        frame = branches.query(load_runs(out))
    assert len(frame) == 16
    [ax] = drawn(branches, frame)
    names = [text.get_text() for text in ax.get_yticklabels()]
    books = "fp8 tensor-wise, released code books"
    recipes = ["bf16", "SwitchBack int8", "LLM.int8()", books]
    assert names == ["from step 10", *recipes, "from step 110", *recipes]
    assert [text.get_text() for text in ax.texts] == ["within 3% of bf16"]
    title = "From both states, no recipe is shown to differ from bf16 or to equal it"
    assert branches.title(frame.assign(outcome="undecided")) == title
    assert branches.title(frame) == ""  # some differ
    one_state = frame[frame["after"] == frame["after"].min()]
    assert branches.title(one_state.assign(outcome="undecided")) == ""
    shown = sorted(len(at) for at in points(ax, "o") if at)
    assert shown == [1] * 6 + [5] * 2 and not points(ax, "X")


def test_a_replay_that_ended_early_is_drawn_as_a_cross(run):
    cut(run, "precision=llm_int8", 30, math.inf)
    [ax] = drawn(branches, branches.query(load_runs(run)))
    crosses = [line for line in ax.get_lines() if line.get_marker() == "X"]
    assert [list(line.get_ydata()) for line in crosses] == [[8]]  # LLM.int8() from step 110


@pytest.mark.slow
def test_table_of_paired_branches_is_that_of_the_records(everything):
    frame = branches.query(everything.where(everything.summaries["experiment"] == "branches"))
    assert set(frame["after"]) == {500, 1000} and set(frame["num_bf16"]) == {5}
    rows = {name: cells for name, *cells in rows_of("| 100 steps in |")}
    for recipe, part in frame.groupby("recipe"):
        cells, ratios, percent = [], [], 100 * np.expm1(part["difference"])
        low, high = (100 * np.expm1(end) for end in paired_branches.interval(part, 0.95))
        for _, each in part.groupby("after").groups.items():
            ratios.append(f"{part['scatter'][each[0]] / part['bf16_scatter'][each[0]]:.1f}")
            if recipe == "bf16":
                cells.append(f"{percent[each].min():+.1f} to {percent[each].max():+.1f}")
            else:
                [at] = each
                cells.append(f"{percent[at]:+.1f} ({low[at]:.1f} to {high[at]:.1f})")
        others = (
            ["", ""] if recipe == "bf16" else [", ".join(ratios), paired_branches.outcome(part)]
        )
        assert rows.pop(naming.precision(recipe)) == cells + others
    assert not rows
