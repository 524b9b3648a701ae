"""Tests all figures at once: drawn from what there is, or named with their command."""

import io
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from analysis import make, paper
from analysis.figures import FIGURES
from analysis.measures import RECALL, VALIDATION_LOSS
from analysis.style import save, style
from lowprec.config.schema import DiagnosticsConfig, InterventionConfig, ScalerConfig, SpikeConfig
from lowprec.runs.read import encode_row
from tests.analysis.conftest import write_rows
from tests.analysis.test_bench_figures import DEVICE, line, model_lines, op_lines, scale_lines
from tests.analysis.test_block_figures import noises
from tests.analysis.test_paired_branches import write_steps
from tests.analysis.test_point_of_no_return import replays, write_table

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "fixtures" / "golden"  # GOLDEN_WRITE=1 writes it anew
STEPS, SPIKE, THINNED = 40, 28, 7
DIMS = (1024, 4096)
UNSTABLE = ["run", "file", "data_digest"]  # names that change with the config's schema
RECIPES = ("high", "switchback", "llm_int8", "fp8_tensorwise", "fp8_switchback")
CHANGES = [InterventionConfig(name) for name in ("none", "zero_init", "kq_norm")]
NARROW = [
    {"output": {"format": "int8", "x": "rowwise", "w": "rowwise"}},
    {"grad_weight": {"format": "e2m1", "g": "columnwise", "x": "columnwise"}},
]
INT8 = {"format": "int8", "g": "columnwise", "x": "columnwise"}
INT8_GRADIENT = {"recipe": "custom", "products": {"grad_weight": INT8}}
STUDIES = {  # experiment: what its runs differ in
    "accuracy_vs_size": [dict(model=m, recipe=r) for m in ("mini_b", "mini_l") for r in RECIPES],
    "loss_curves": [dict(model="mini_b", recipe=recipe) for recipe in RECIPES],
    "formats": [dict(model="mini_l", recipe=recipe) for recipe in ("mxfp8", "mxfp4", "nvfp4")],
    "fp8_fixes": [
        *(dict(recipe="fp8_tensorwise", intervention=change) for change in CHANGES),
        dict(recipe="fp8_tensorwise", optimizer="adamw_clip", clip_norm=1.0),
        dict(recipe="high"),
    ],
    "feature_magnitude": [dict(intervention=change) for change in CHANGES[:2]],
    "gradient_magnitude": [dict(intervention=change) for change in CHANGES[:2]],
    "loss_scaler": [dict(scaler=ScalerConfig(n), autocast="fp16") for n in ("dynamic", "fixed")],
    "beta2_schedule": [dict(beta2_decay=decay) for decay in (None, 0.5)],
    "rms_and_loss": [dict(beta2=beta2) for beta2 in (0.9, 0.99, 0.999)],
    "update_clipping": [dict(optimizer=name) for name in ("adamw", "adamw_clip", "stable_adamw")],
    "stability": [
        dict(beta2=b, optimizer=o) for b in (0.9, 0.99) for o in ("adamw", "stable_adamw")
    ],
    "kq_norm": [dict(beta2=b, intervention=CHANGES[2]) for b in (0.9, 0.99)],
    "spikes_vs_size": [dict(model=model, beta2=0.99) for model in ("mini_b", "mini_l")],
    "spikes_vs_batch": [dict(batch_size=size, beta2=0.99) for size in (256, 1024)],
    "spikes_vs_lr": [dict(lr=lr, beta2=0.99) for lr in (5e-4, 4e-3)],
    "spikes_vs_precision": [dict(recipe=r, beta2=0.99) for r in ("switchback", "fp8_tensorwise")],
    "one_product": [dict(recipe="custom", products=products) for products in NARROW],
    "point_of_no_return": [dict(beta2=0.99)],
    "branches": [dict(optimizer="stable_adamw")],
    "weight_gradient": [
        dict(model=model, **precision)
        for model in ("vit_b14", "vit_l14", "vit_h14")
        for precision in ({"recipe": "high"}, {"recipe": "llm_int8"}, INT8_GRADIENT)
    ],
    "interventions": [dict(model="vit_h14", intervention=change, lr=2e-3) for change in CHANGES],
    "lr_map": [dict(model="vit_h14", recipe=r, lr=2e-3) for r in ("high", "llm_int8")],
    "rounding": [dict(model="mini_l", lr=1e-3 + 2e-10 * k) for k in (1, 2)],
}
RESULTS = ("zero_shot/top1", *RECALL, VALIDATION_LOSS)
WATCHED = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=5, window=10))


def tables(rank, first=10):
    """RMS_t and gradients every step, features every tenth from the first, without chance."""
    steps = np.arange(1, STEPS + 1)
    blocks = [paper.BLOCK.format(k) for k in range(4)]
    names = ["visual.conv1.weight", "visual.class_embedding", "token_embedding.weight"]
    parts = ("mlp.c_proj.weight", "mlp.c_fc.weight", "attn.in_proj_weight")
    names += [f"{block}.{part}" for block in blocks for part in parts]
    wave = 1 + 0.3 * np.sin(np.outer(steps, np.arange(1, len(names) + 1)) / 7 + rank)
    rms = pd.DataFrame(wave, steps, names)
    rms.loc[SPIKE - 3, names[0]] = 5
    tenths = steps[first - 1 :: 10]
    features = pd.DataFrame(np.outer(tenths, np.arange(1.0, 5)) / 10 + rank, tenths, blocks)
    of_tensors = {"rms": rms, "grad_norm": rms / 10, "grad_abs_max": rms / 100}
    of_blocks = {"feature_mean": features, "logit_max": 10 * features}
    return {"tensors": of_tensors, "blocks": of_blocks}


def lines():
    """Benchmark lines of every slug whose times follow from the sizes."""
    yield from op_lines(DIMS)
    yield from model_lines()
    yield from scale_lines()
    for case, ms in (("high", 30.0), ("switchback", 20.0)):
        facts = {"image_size": 32, "patch_dropout": 0.0, "compiled": False, "optimizer": "adamw"}
        yield line("step", case, ms, shape="mini_l batch 128", batches="loaded", **facts)
    for case, factor in (("int8", 1.0), ("e4m3", 3.0), ("e5m2 e4m3", 9.0)):
        for inner in (64, 1024, 16384):
            numbers = dict(measured=factor * inner * 1.01, predicted=factor * inner, ratio=1.01)
            yield line("quantization_variance", case, None, inner_dim=inner, **numbers)


def write_studies(root, write_run):
    """Runs of every study, and benchmark lines."""
    steps = np.arange(STEPS)
    for experiment, cells in STUDIES.items():
        for rank, cell in enumerate(cells):
            scale = np.where(steps < 20, 65536.0, 32768.0)
            score = np.full(STEPS, 0.2 + rank / 100)
            columns = {name: score for name in RESULTS} | {"loss_scale": scale}
            keys = {"optimizer": "adamw", "num_steps": STEPS, "scale": "mini", "gpu": DEVICE} | cell
            losses = 1 + 5 * np.exp(-steps / 10) + 0.05 * np.sin(steps + rank)
            losses[SPIKE - 1 : SPIKE + 2] += 2
            of_run = tables(rank, 8 if experiment == "weight_gradient" else 10)  # a fifth of it
            run = write_run(root, experiment=experiment, columns=columns, losses=losses,
                            tables=of_run, diagnostics=WATCHED, **keys)  # fmt: skip
            event = {"step": SPIKE - 3, "spike": "rms", "rms": {"visual.conv1.weight": 5.0}}
            write_rows(run / "events.jsonl", [event])
            if experiment == "point_of_no_return":
                write_table(run, replays())
            if experiment == "branches":
                write_steps(run)
            if experiment == "weight_gradient" and rank == 0:
                write_rows(run / "quant_error.jsonl", noises())
    for row in lines():
        path = root / "bench" / row["slug"] / "20260101-000000.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(encode_row(row))


def file_of(slug):
    figure = FIGURES[slug]
    return slug if figure.lines else f"{slug}_mini"


@pytest.fixture
def drawn(tmp_path, write_run, monkeypatch, capsys):
    """The folder of all figures of all studies, and the drawn pictures by name."""
    pictures = {}

    def keep(figure, stem, frame):
        pictures[stem.name] = figure
        save(figure, stem, frame)

    write_studies(tmp_path / "runs", write_run)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)  # a second per picture
    monkeypatch.setattr(make, "save", keep)
    out = tmp_path / "out"
    assert make.main(["all", "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert "not drawn" not in capsys.readouterr().err
    return out, pictures


def test_every_figure_draws_the_golden_numbers_in_whole_panels(drawn):
    out, pictures = drawn
    assert set(pictures) == {file_of(slug) for slug in FIGURES}
    assert {path.stem for path in out.glob("*.json")} == set(pictures)
    assert {path.stem for path in GOLDEN.glob("*.csv")} == set(FIGURES)
    table = (ROOT / "analysis" / "README.md").read_text()
    for slug in FIGURES:
        assert f"`{slug}`" in table
        check_numbers(slug, pd.read_csv(out / f"{file_of(slug)}.csv"))
        check_picture(slug, pictures[file_of(slug)])


def check_numbers(slug, values):
    """Fails unless the plotted numbers are those of the golden file."""
    values = values.drop(columns=UNSTABLE, errors="ignore").iloc[::THINNED].reset_index(drop=True)
    golden = GOLDEN / f"{slug}.csv"
    if os.environ.get("GOLDEN_WRITE"):
        values.to_csv(golden, index=False, float_format="%.9g", lineterminator="\n")
    expected = pd.read_csv(golden)
    values = pd.read_csv(io.StringIO(values.to_csv(index=False)))  # types are those of these rows
    assert list(values) == list(expected), slug
    # nine digits are kept; RMS_t is stored in float32
    pd.testing.assert_frame_equal(
        values, expected, rtol=1e-6, atol=1e-9, check_dtype=False, obj=slug
    )


def check_picture(slug, figure):
    """Fails if a panel is empty or a label is cut."""
    with style():
        figure.draw_without_rendering()
        box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert figure.axes and all(has_data(ax) for ax in figure.axes if ax.axison), slug
    slack = 0.02  # inches: half the width of a line at the edge
    assert min(box.x0, box.y0) >= -slack, slug
    assert box.x1 <= width + slack and box.y1 <= height + slack, slug


@pytest.mark.slow  # reads all records; part of .ci/run
def test_committed_pictures_are_what_the_command_draws(tmp_path):
    records = ROOT / "experiments" / "results"
    assert make.main(["pictures", "--runs", str(records), "--out", str(tmp_path)]) == 0
    committed = sorted(records.rglob("*.png"))
    drawn_anew = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.png")}
    assert {path.relative_to(records) for path in committed} == drawn_anew != set()
    for path in committed:
        ours, drawn = (
            Image.open(f).convert("L") for f in (path, tmp_path / path.relative_to(records))
        )
        assert ours.size == drawn.size, path
        difference = np.abs(np.asarray(ours, float) - np.asarray(drawn, float))
        assert (difference > 32).mean() < 1e-5, path  # a point has more pixels


def has_data(ax):
    lines = [np.asarray(line.get_ydata(), float) for line in ax.lines]
    filled = ax.patches or any(each.get_array() is not None for each in ax.collections)
    return bool(filled) or any(np.isfinite(line).any() for line in lines)


@pytest.mark.parametrize("slug", FIGURES)
def test_without_runs_a_figure_names_the_command_that_makes_them(tmp_path, capsys, slug):
    assert make.main([slug, "--runs", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert "to make some: python -m experiments." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("no_pictures")
def test_figures_without_runs_share_a_line_and_others_say_why_they_are_not_drawn(
    make_run, tmp_path, capsys
):
    root, out = tmp_path / "runs", tmp_path / "out"

    def make_all(*extra):
        code = make.main(["all", "--runs", str(root), "--out", str(out), *extra])
        return code, capsys.readouterr().err.splitlines()

    code, errors = make_all()
    assert code == 2 and len(errors) == 1 and "no such folder" in errors[0]
    of_none = {"experiment": None, "scale": "mini", "model": "mini_b", "optimizer": "stable_adamw"}
    make_run(num_steps=20, **of_none)
    code, [summary, advice] = make_all()
    num = len(FIGURES) - 3
    assert code == 2 and f"beta2_schedule and {num} more (to see why, name one" in summary
    assert advice == "to draw runs of another experiment: --experiment NAME, or any"
    code, [error] = make_all("--experiment", "other")
    assert code == 2 and "no runs with experiment=other" in error and not out.exists()
    for scale in ("mini", "demo"):
        make_run(num_steps=20, **of_none | {"experiment": "loss_curves", "scale": scale})
    make_run(num_steps=20, steps=0, state="failed", experiment="rms_and_loss", scale="mini")
    code, [why, summary] = make_all()
    assert why.startswith("not drawn: rms_and_loss: ")
    lacking = "no run has steps and an undamaged config yet (failed: 0 of 20 steps)"
    assert code == 0 and f"{lacking}; to make runs: " in why
    assert summary.startswith("not drawn: accuracy_vs_size, ") and f"and {num - 2} more" in summary
    assert {path.stem for path in out.glob("*.png")} == {"loss_curves_mini", "loss_curves_demo"}
    code, errors = make_all("--experiment", "rms_and_loss")
    assert code == 2 and why in errors and f"and {num - 1} more" in errors[-1], errors


def test_lines_that_lack_what_a_figure_shows_are_said_to_without_advice_on_runs(tmp_path, capsys):
    alone = line("model", "switchback", 20.0, shape="mini_l batch 128")
    write_rows(tmp_path / "runs/bench/model/1.jsonl", [alone])
    out = tmp_path / "out"
    assert make.main(["all", "--runs", str(tmp_path / "runs"), "--out", str(out)]) == 2
    why, summary, _ = capsys.readouterr().err.splitlines()
    assert why.startswith("not drawn: end_to_end_speed: no line of ") and "name one in" in summary
