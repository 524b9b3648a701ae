"""quant_error: captured tensors, rows, the table, and lines for random numbers."""

import json
import math
import shutil

import pytest
import torch

from experiments import quant_noise
from experiments.quant_error import QuantErrorConfig, main, worst_layers
from experiments.quant_noise import capture, find_layers
from lowprec.config.check import RunError
from lowprec.nn.noise import recorded
from lowprec.runs.read import read_rows

LAYERS = {"attn.in_proj", "attn.out_proj", "mlp.c_fc", "mlp.c_proj"}


PRECISIONS = [{}, {"precision.autocast": "bf16", "precision.recipe": "switchback"}]


@pytest.fixture(scope="module", params=PRECISIONS)
def trained(request, run_once, tiny_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    run_once(
        tiny_config(folder, {"num_steps": 4, "model.vision_layers": 1, **request.param}), folder
    )
    return folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_captured_tensors_give_the_weight_gradients(built):
    built = built({"model.vision_layers": 1})
    captured = {}

    def keep(name, x, w, g):
        captured[name] = {"x": x, "w": w, "g": g}

    with recorded(find_layers(built), keep):
        loss, _ = built.task.loss(next(built.batches_from(1)))
        loss.backward()
    assert {name.split(".", 3)[-1].removeprefix("0.") for name in captured} >= LAYERS
    assert len(captured) == 8
    parameters = dict(built.task.model.named_parameters())
    for name, operands in captured.items():
        weight = parameters.get(f"{name}.weight", parameters.get(f"{name}_weight"))
        assert torch.equal(operands["w"], weight)
        torch.testing.assert_close(
            operands["g"].T @ operands["x"], weight.grad, atol=1e-6, rtol=1e-4
        )


def test_a_run_is_measured_in_the_precision_of_the_step(run_once, make_config, tmp_path):
    change = {"precision_change.step": 2, "precision_change.autocast": "bf16"}
    cache = {"data.cache": str(tmp_path / "cache")}
    sizes = {"num_steps": 4, "model.vision_layers": 1}
    config = make_config({**sizes, **change, **cache})
    run_once(config, tmp_path / "run")
    shutil.rmtree(tmp_path / "cache")
    _, layers = capture(tmp_path / "run", "cpu")
    assert {tensors["g"].dtype for tensors in layers.values()} == {torch.bfloat16}
    assert not (tmp_path / "cache").exists()  # that of the training machine


def test_run_is_measured_in_its_precision_and_unchanged(run, capsys):
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    main(QuantErrorConfig(run=str(run), recipes=["switchback", "high"], device="cpu"))
    rows = read_rows(run / "quant_error.jsonl")
    assert len(rows) == 2 * 8 * 6
    assert {row["step"] for row in rows} == {4}
    assert all(path.read_bytes() == content for path, content in before.items())
    _, layers = capture(run, "cpu")
    autocast = json.loads((run / "config.yaml").read_text())["precision"]["autocast"]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[autocast]
    assert {tensors["x"].dtype for tensors in layers.values()} == {dtype}
    assert "switchback" in capsys.readouterr().out


def test_chosen_checkpoints_layers_and_tokens_are_measured(run):
    first = {"layers": ["visual.*.0.mlp.c_fc"], "checkpoints": [0, 4], "num_tokens": [8, 32]}
    main(QuantErrorConfig(run=str(run), recipes=["llm_int8"], device="cpu", batch_size=4, **first))
    rows = read_rows(run / "quant_error.jsonl")
    assert {row["layer"] for row in rows} == {"visual.transformer.resblocks.0.mlp.c_fc"}
    terms = [(r["step"], r["inner_dim"]) for r in rows if r["product"] == "grad_weight"]
    assert set(terms) == {(step, tokens) for step in (0, 4) for tokens in (8, 32)}
    peaks = {r["step"]: r["peak"] for r in rows if (r["product"], r["operand"]) == ("output", "w")}
    assert peaks[0] != peaks[4]  # other weights


def test_initial_weights_are_those_that_the_run_began_with(run_once, make_config, tmp_path):
    small = {"num_steps": 4, "model.vision_layers": 1}
    run_once(make_config({**small, "seed": 1}), tmp_path / "first")
    _, first = capture(tmp_path / "first", "cpu")
    run_once(make_config({**small, "model.init_from": str(tmp_path / "first")}), tmp_path / "next")
    step, initial = capture(tmp_path / "next", "cpu", checkpoint=0)
    assert step == 0
    assert all(torch.equal(initial[name]["w"], first[name]["w"]) for name in first)


def test_a_checkpoint_or_layer_that_a_run_lacks_is_refused_with_those_that_it_has(run):
    for options, reason in (
        ({"checkpoints": [3]}, r"no checkpoint of step 3, only of \[4\]"),
        ({"layers": ["mlp"]}, r"layers=\['mlp'\] match none .*visual"),
    ):
        with pytest.raises(RunError, match=reason):
            main(QuantErrorConfig(run=str(run), device="cpu", **options))


def test_the_worst_layers_come_first_and_nan_is_the_worst():
    decibels = {"fine": 30.0, "broken": math.nan, "poor": 10.0, "exact": math.inf}
    rows = [
        {"recipe": "r", "product": "output", "layer": layer, "product_sqnr_db": db, "operand": x}
        for layer, db in decibels.items()
        for x in "xw"
    ]
    assert worst_layers(rows)["layer"].tolist() == ["broken", "poor", "fine"]


def test_random_numbers_give_a_line_per_case_and_dimension(tmp_path):
    main(QuantErrorConfig(inner_dims=[64, 256], run_dir=str(tmp_path)))
    [file] = (tmp_path / "bench" / quant_noise.SLUG).glob("*.jsonl")
    rows = read_rows(file)
    assert [(row["case"], row["inner_dim"]) for row in rows] == [
        *(
            (case, dim)
            for dim in (64, 256)
            for case in (*quant_noise.CASES, *quant_noise.WITH_BLOCKS)
        ),
    ]
    measured = {row["case"]: row["measured"] / 256 for row in rows[8:]}  # a term's signal is 1
    assert all(measured[name] < 0.002 for name in ("int8", "e4m3", "fp8_blockwise", "mxfp8"))
    assert all(0.01 < measured[name] < 0.05 for name in ("mxfp4", "nvfp4", "nvfp4_rht_sr"))
    assert all(row["correct"] and row["slug"] == quant_noise.SLUG for row in rows)
    main(QuantErrorConfig(inner_dims=[2], run_dir=str(tmp_path)))  # too few for the prediction
    assert not all(row["correct"] for f in file.parent.iterdir() for row in read_rows(f))
