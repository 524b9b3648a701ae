"""`precision_change` changes the recipe at a step, and nothing else."""

import json
import shutil
from dataclasses import asdict

import pandas as pd
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from experiments import evaluate
from experiments.replay import ReplayConfig, suspects
from experiments.replay import main as replay_main
from experiments.replay_steps import Replayer
from lowprec.config.check import ConfigError
from lowprec.nn.linear import LowPrecisionLinear
from lowprec.runs.read import find_runs, read_config, read_rows
from lowprec.train import build as building
from lowprec.train import loop
from lowprec.train.checkpoint import list_checkpoints
from lowprec.train.run import train_run
from tests.same import contents, differing, recorded, saved

CHANGES = {
    "to high": ({"recipe": "switchback"}, {"recipe": "high"}),
    "from high": ({"recipe": "high"}, {"recipe": "llm_int8"}),
    "stochastic": ({"recipe": "nvfp4_rht_sr"}, {"recipe": "custom"}),
    "autocast": ({"recipe": "switchback", "autocast": "bf16"}, {"autocast": "fp32"}),
}
PRODUCTS = {"output": {"format": "e4m3", "x": "rowwise", "w": "rowwise", "stochastic": ["x"]}}
STEP = 5  # with checkpoints after steps 3, 6 and 8


@pytest.fixture
def config_of(make_config):
    """`config_of(name, step)`: a run of 8 steps with a change; step None: without it."""

    def make(name, step=STEP):
        before, after = CHANGES[name]
        precision = {f"precision.{key}": value for key, value in before.items()}
        change = {"precision_change": {"step": step, **after}} if step else {}
        if change and after.get("recipe") == "custom":
            precision["precision.products"] = PRODUCTS
        short = {"num_steps": 8, "save_every": 3, "keep_checkpoints": 3}
        return make_config({**precision, **change, **short})

    return make


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_two_runs_in_a_row(config_of, make_config, run_once, tmp_path, name):
    run_once(config_of(name), tmp_path / "changed")
    changed = contents(tmp_path / "changed")
    events = [e for e in read_rows(tmp_path / "changed" / "events.jsonl") if "precision" in e]
    label = config_of(name).precision_at(STEP).label
    assert events == [{"step": STEP, "precision": label}]
    # the same steps by hand: the first recipe, saved, then the second from the checkpoint on
    run_once(config_of(name, None), tmp_path / "parts", stop_at=STEP - 1)
    after = config_of(name).precision_at(STEP)
    shutil.copytree(tmp_path / "parts", tmp_path / "unchanged")
    second = config_of(name, None)
    second.precision, second.skip_batches = after, 0
    state = list_checkpoints(tmp_path / "parts")[-1]
    folder = tmp_path / "parts" / "checkpoints"
    rows = Replayer(STEP, 8).replay(second, state, save_after=[8], folder=folder)
    assert not differing(saved(tmp_path / "changed"), saved(tmp_path / "parts"))
    losses = recorded(tmp_path / "changed", "loss")
    assert losses[STEP - 1 :] == rows["loss"].tolist()
    # it matters (a resumed run is the undisturbed one: tests/train/test_loop.py)
    run_once(config_of(name, None), tmp_path / "unchanged")
    unchanged = recorded(tmp_path / "unchanged", "loss")
    assert losses[: STEP - 1] == unchanged[: STEP - 1] and losses[STEP:] != unchanged[STEP:]
    for cut in (STEP - 1, STEP) if name == "stochastic" else (STEP,):
        folder = tmp_path / f"cut_{cut}"
        run_once(config_of(name), folder, stop_at=cut)
        torch.manual_seed(12345)
        run_once(config_of(name), folder)
        assert not differing(changed, contents(folder))
        assert [e for e in read_rows(folder / "events.jsonl") if "precision" in e] == events


def test_replays_take_the_recipe_of_the_step(config_of, run_once, tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    run_once(config_of("to high"), run)
    fp32 = list(suspects(asdict(read_config(run))))[-1]
    assert fp32[2:] == ["precision_change.step=null", "precision_change.recipe=null"]
    for step, changes in ((6, fp32), (7, ["precision=mxfp8"])):  # from before and after it
        replay_main(ReplayConfig(str(run), step, 2, perturbed=0), list(changes))
        assert "recorded losses exactly" in capsys.readouterr().out
    first, second = (pd.read_csv(path) for path in sorted((run / "replays").glob("*_table.csv")))
    assert (first["peak"] != first["peak"][0]).any() and (second["peak"] != second["peak"][0]).any()
    same = f"optimizer.beta2={read_config(run).optimizer.beta2}"  # the control once more
    replay_main(ReplayConfig(str(run), 6, 2, perturbed=0), [same])
    control, again = pd.read_csv(run / "replays" / f"step_6_{same}_table.csv")["loss"]
    assert control == again
    built, build = [], building.build
    monkeypatch.setattr(building, "build", lambda *a: built.append(build(*a)) or built[-1])
    config = evaluate.EvaluateConfig(str(run), device="cpu")
    config.evaluation.name = "zero_shot"
    evaluate.main(config)
    assert built[-1].config.precision.recipe == "high"
    for checkpoint in list_checkpoints(run)[1:]:
        (checkpoint / "manifest.json").unlink()
    evaluate.main(config)
    assert built[-1].config.precision.recipe == "switchback"
    assert built[-1].config.precision_change.step is None  # the other recipe may not run here


class FakeGraph:
    """Takes a step without a CUDA graph."""

    captured, freed = [], []

    def __init__(self, step, batch):
        self.step = step
        layers = [m for m in step.task.model.modules() if isinstance(m, LowPrecisionLinear)]
        self.captured.append({layer.recipe.name for layer in layers})

    def __call__(self, batch):
        return self.step(batch)

    def close(self):
        self.freed.append(len(self.captured))


@pytest.mark.filterwarnings("ignore")  # torch.compile's own warnings
def test_compiled_blocks_and_the_graph_are_built_again(config_of, run_once, tmp_path, monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")

    def compile_first_block(model, blocks):  # each takes a second
        blocks[0].compile(dynamic=False, backend=counter)

    monkeypatch.setattr(FakeGraph, "captured", [])
    monkeypatch.setattr(FakeGraph, "freed", [])
    monkeypatch.setattr(loop, "GraphedStep", FakeGraph)
    monkeypatch.setattr(loop, "can_capture", lambda *_: True)
    monkeypatch.setattr(building, "compile_blocks", compile_first_block)
    monkeypatch.setattr(building, "compile_embedding", lambda visual: None)
    config = config_of("to high")
    config.compile = True
    frames = []
    watch = {STEP: lambda _: frames.append(counter.frame_count)}
    limit = torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True)
    with limit:
        run_once(config, tmp_path / "compiled", at=watch)
    assert FakeGraph.captured == [{"switchback"}, set()]  # nn.Linear again
    assert FakeGraph.freed == [1, 2]
    assert 0 < frames[0] < counter.frame_count == 2 * frames[0]
    config.compile = False
    run_once(config, tmp_path / "eager")
    compiled, eager = (tmp_path / name / "metrics.jsonl" for name in ("compiled", "eager"))
    assert compiled.read_bytes() == eager.read_bytes()


def test_layers_of_the_later_recipe_are_listed_if_the_first_has_none(config_of, capsys):
    config = config_of("from high")
    train_run(config)
    [folder] = find_runs(config.run_dir)
    layers = json.loads((folder / "layers.json").read_text())
    assert layers and all(layer["swapped"] for layer in layers)
    assert "llm_int8" in capsys.readouterr().out


def test_a_later_recipe_that_does_not_fit_is_refused(make_config, run_once, tmp_path):
    change = {"step": 6, "recipe": "switchback"}
    where = {"precision.backend": "triton", "precision_change": change}
    with pytest.raises(ConfigError, match="precision.recipe=switchback"):
        run_once(make_config(where), tmp_path / "run")
