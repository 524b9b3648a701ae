"""Figures of what runs record of blocks: feature_magnitude, gradient_magnitude."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from analysis import load_runs, make, paper, style
from analysis.figures import feature_magnitude, gradient_magnitude
from lowprec.config.schema import InterventionConfig

BLOCKS = [paper.BLOCK.format(k) for k in range(4)]
WEIGHTS = [f"{block}.mlp.c_proj.weight" for block in BLOCKS]
STEPS = 200


@pytest.fixture(name="record")
def record_fixture(make_run):
    """A function that makes a run with block k's features (k + 1) * step, and its gradients."""

    def record(intervention="none", details=True, last=STEPS, **keys):
        every = np.arange(1, STEPS + 1)
        norms = pd.DataFrame(np.outer(1.0 / every, np.arange(1, 5)), every, WEIGHTS)
        norms.loc[20, WEIGHTS[0]] = np.inf
        at = np.arange(50, last + 1, 50)
        features = pd.DataFrame(np.outer(at, np.arange(1.0, 5)), at, BLOCKS)
        text = features.rename(columns=lambda name: name.removeprefix("visual."))
        blocks = pd.concat([features, text * 1e6], axis=1)
        tables = {"tensors": {"rms": norms, "grad_norm": norms}}
        tables |= {"details": {"grad_abs_max": norms.loc[100::100] / 10}} if details else {}
        tables |= {"blocks": {"feature_mean": blocks, "feature_max": blocks * 9}}
        keys = {"num_steps": STEPS, "experiment": "gradient_magnitude"} | keys
        return make_run(intervention=InterventionConfig(intervention), tables=tables, **keys)

    return record


def drawn(module, frame):
    figure = Figure(layout="constrained")
    module.draw(frame, figure)
    figure.draw_without_rendering()
    return figure.axes


def test_features_are_those_of_the_vision_tower_at_the_first_and_last_record(record, tmp_path):
    record()
    record("zero_init")
    frame = feature_magnitude.query(load_runs(tmp_path / "runs"))
    assert tuple(frame.columns) == feature_magnitude.COLUMNS
    assert frame["intervention"].unique().tolist() == ["none", "zero_init"]
    shown = frame[frame["intervention"] == "none"].set_index(["at", "block"])["feature_mean"]
    assert shown["first"].to_dict() == {0: 50, 1: 100, 2: 150, 3: 200}
    assert shown["last"].to_dict() == {0: 200, 1: 400, 2: 600, 3: 800}
    assert "first record (dotted: step 50) and the last" in feature_magnitude.caption(frame)


def test_features_have_the_color_of_the_intervention_and_are_dotted_early(record, tmp_path):
    record("zero_init")
    record()
    (ax,) = drawn(feature_magnitude, feature_magnitude.query(load_runs(tmp_path / "runs")))
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == [
        *("no change, step 50", "no change, step 200"),
        *("zero-init layer-scale, step 50", "zero-init layer-scale, step 200"),
    ]
    lines = ax.get_lines()
    assert [line.get_linestyle() for line in lines] == ["--", "-"] * 2
    shades = [style.paler(style.INTERVENTIONS[name][1], 0) for name in ("none", "zero_init")]
    assert [line.get_color() for line in lines] == [shade for shade in shades for _ in range(2)]
    np.testing.assert_array_equal(lines[3].get_ydata(), [200, 400, 600, 800])


def test_a_running_run_shows_the_last_features_there_are(record, tmp_path):
    record(state="running", steps=120)
    frame = feature_magnitude.query(load_runs(tmp_path / "runs"))
    assert frame["step"].unique().tolist() == [50, 100]
    assert "(incomplete: 120 of 200 steps)" in feature_magnitude.caption(frame)


def test_gradients_are_of_the_last_product_of_the_shown_blocks(record, tmp_path):
    record()
    frame = gradient_magnitude.query(load_runs(tmp_path / "runs"))
    norms = frame[frame["statistic"] == "grad_norm"].pivot(
        index="step", columns="block", values="gradient"
    )
    assert norms.columns.tolist() == [0, 1, 2, 3] and len(norms) == STEPS
    assert norms.loc[10].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert np.isnan(norms.loc[20, 0])  # infinite: a gap
    largest = frame[frame["statistic"] == "grad_abs_max"]
    assert sorted(largest["step"].unique()) == [100, 200]


def test_gradients_have_a_column_a_run_and_a_row_a_recorded_statistic(record, tmp_path):
    record("zero_init", model="mini_l")
    record(model="mini_l")
    axes = drawn(gradient_magnitude, gradient_magnitude.query(load_runs(tmp_path / "runs")))
    titles = [ax.get_title() for ax in axes]
    assert titles == ["mini L\nno change", "mini L\nzero-init layer-scale", "", ""]
    assert [ax.get_ylabel() for ax in axes] == ["gradient norm", "", "largest gradient", ""]
    assert axes[0].get_ylim() == axes[1].get_ylim()
    names = [text.get_text() for text in axes[2].get_legend().get_texts()]
    assert names == ["block 0", "block 1", "block 2", "block 3"]
    smoothed = axes[0].get_lines()[1::2]
    colors = [line.get_color() for line in smoothed]
    assert colors == [style.depth_color(k / 3) for k in range(4)]


def test_without_a_record_of_the_largest_gradient_there_is_one_row(record, tmp_path):
    record(details=False)
    assert len(drawn(gradient_magnitude, gradient_magnitude.query(load_runs(tmp_path)))) == 1


@pytest.mark.parametrize(
    ("depth", "blocks"),
    [(32, [0, 10, 20, 30]), (12, [0, 3, 7, 11]), (4, [0, 1, 2, 3]), (1, [0]), (np.nan, [0])],
)
def test_shown_blocks_are_as_deep_as_those_of_the_paper(depth, blocks):
    shown = paper.blocks_at_paper_depths(depth)
    assert all(abs(a - b) <= 1 for a, b in zip(shown, blocks, strict=True)) and shown[0] == 0


@pytest.mark.parametrize("module", [feature_magnitude, gradient_magnitude])
def test_runs_without_a_record_and_with_damaged_configs_are_left_out(make_run, tmp_path, module):
    make_run(num_steps=60)
    damaged = make_run(num_steps=60, seed=1)
    (damaged / "config.yaml").write_text("{")
    assert module.query(load_runs(tmp_path / "runs")).empty


def test_make_writes_both(record, tmp_path, capsys):
    for slug in ("feature_magnitude", "gradient_magnitude"):
        record(experiment=slug)
        arguments = [slug, "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
        assert make.main(arguments) == 0
        assert (tmp_path / "out" / f"{slug}_demo.png").stat().st_size > 10_000
    assert "All runs: bf16, AdamW." in capsys.readouterr().out
