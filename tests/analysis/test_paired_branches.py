"""How far recipes part from bf16, from steps as `experiments.replay` writes them."""

import math

import numpy as np
import pandas as pd
import pytest

from analysis import load_runs
from analysis.figures import branches, paired_branches
from experiments import compact
from tests.analysis.conftest import drawn

BOOKS = "precision.recipe=custom precision.products={output: {format: e4m3_bnb}}"
NULLS = (-0.02, -0.01, 0.01, 0.02)  # log loss minus the control's, in the second half
RECIPES = {"precision=switchback": 0.001, "precision=llm_int8": 0.2, BOOKS: -0.2}


def write_steps(run, after=10, nulls=NULLS, recipes=RECIPES, wave=0.001):
    """Writes the steps of replays of a run from a state, as the command does."""
    steps, second = np.arange(after + 1, after + 9), np.arange(8) >= 4
    changes = [("recorded", math.nan, 0.0), ("control", math.nan, 0.0)]
    changes += [("perturbed", n, shift) for n, shift in enumerate(nulls, 1)]
    changes += [(change, math.nan, shift) for change, shift in recipes.items()]
    frames = []
    for change, perturbation, shift in changes:
        waves = 0 if change in ("recorded", "control") else wave * (-1.0) ** steps
        loss = 2 * np.exp(np.where(second, shift + waves, 0))
        facts = {"change": change, "perturbation": perturbation, "change_from": after + 1}
        frames.append(pd.DataFrame({"step": steps, "loss": loss, **facts}))
    (run / "replays").mkdir(exist_ok=True)
    name = run / "replays" / f"step_{after + 4}"
    pd.concat(frames).to_csv(f"{name}.csv", index=False)
    pd.DataFrame({"change": ["control"]}).to_csv(f"{name}_table.csv", index=False)


@pytest.fixture
def run(make_run):
    """A run with replays from two states."""
    run = make_run(num_steps=30, experiment="branches")
    write_steps(run)
    write_steps(run, after=20)
    return run


def of(recipe, frame):
    """The rows of a recipe."""
    return frame[frame["recipe"] == recipe]


def test_differences_are_from_all_replays_in_bf16_in_the_second_half(run):
    frame = branches.query(load_runs(run))
    assert len(frame) == 2 * (1 + 4 + 3) and set(frame["after"]) == {10, 20}
    llm = of("llm_int8", frame).iloc[0]
    assert llm["difference"] == pytest.approx(0.2)  # the mean of bf16 is 0
    sd = math.sqrt(2 * (0.01**2 + 0.02**2) / 4)
    assert llm["error"] == pytest.approx(sd * math.sqrt(1 + 1 / 5)) and llm["num_bf16"] == 5
    low, high = paired_branches.interval(of("llm_int8", frame), 0.95)
    assert (high - low).iloc[0] / 2 == pytest.approx(3.0414 * sd, rel=1e-4)
    assert of("bf16", frame)["difference"].sum() == pytest.approx(0, abs=1e-12)
    assert llm["scatter"] == pytest.approx(llm["bf16_scatter"]) and llm["scatter"] > 0.001


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "differs"),
        ({"recipes": {"precision=llm_int8": -0.2}}, "undecided"),  # on the other side
        ({"recipes": {"precision=llm_int8": 0.04}}, "undecided"),
        ({"recipes": {"precision=llm_int8": math.inf}}, "diverges"),
        ({"nulls": (math.inf,) + NULLS[1:]}, "undecided"),
    ],
)
def test_a_recipe_differs_only_if_both_states_agree(run, change, expected):
    write_steps(run, after=20, **change)
    frame = branches.query(load_runs(run))
    assert paired_branches.outcome(of("llm_int8", frame)) == expected


def test_a_recipe_is_equal_only_near_bf16_and_if_the_nulls_vary_as_much(run):
    close = {"nulls": (-0.002, -0.001, 0.001, 0.002), "recipes": {"precision=switchback": 0.02}}
    for after in (10, 20):
        write_steps(run, after, **close | {"recipes": {"precision=switchback": 0.001}})
    rows = of("switchback", branches.query(load_runs(run)))
    assert paired_branches.outcome(rows) == "equal within 3%"
    assert paired_branches.outcome(rows.assign(bf16_scatter=0.49 * rows["scatter"])) == "undecided"
    far = rows.assign(difference=rows["difference"] + 0.029, error=0.02)
    assert paired_branches.outcome(far) == "undecided"


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
    assert names == ["bf16", "SwitchBack int8", "LLM.int8()", books]
    assert [len(line.get_xdata()) for line in ax.get_lines()[:2]] == [8, 8]
