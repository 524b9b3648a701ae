"""`optimizer.lr_scale` locks towers and scales learning rates by name."""

import math

import pytest
import torch
from safetensors.torch import load_file

from analysis import comparison, load_runs
from experiments import export, replay
from experiments import train as entry
from lowprec.clip import open_clip
from lowprec.config.check import ConfigError, RunError
from lowprec.config.compose import compose_command
from lowprec.optim.schedules import lock, set_learning_rate
from lowprec.runs.identity import digest
from lowprec.runs.read import find_runs, read_config, read_rows
from lowprec.runs.tables import read_tensors
from lowprec.train.build import build
from lowprec.train.checkpoint import list_checkpoints

LAST = {"visual.transformer.resblocks.1": 1.0, "visual.ln_post": 1.0, "visual.proj": 1.0}
LOCKS = [{"image": 0}, {"text": 0}, {"visual": 0, **LAST}, {"*.c_fc.weight": 0}, {"logit_scale": 0}]
INT8 = {"precision.recipe": "switchback", "precision.backend": "reference"}


@pytest.fixture
def built(built):
    def make(lr_scale, changes=None):
        return built({"optimizer.lr_scale": lr_scale, "model.vision_layers": 2, **(changes or {})})

    return make


def gradients(built):
    """The gradients of a first batch, by name; those of locked parameters are missing."""
    built.task.model.train()
    built.task.backward(next(built.batches_from(1)), lambda loss: loss)
    named = built.task.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def trained(model):
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("lr_scale", "locked_by_open_clip"),
    [
        ({"image": 0}, lambda model: model.lock_image_tower()),
        ({"visual": 0, **LAST}, lambda model: model.lock_image_tower(unlocked_groups=2)),
        ({"text": 0}, lambda model: model.lock_text_tower()),
    ],
    ids=["image", "image but two groups", "text"],
)
def test_locking_equals_open_clips(built, lr_scale, locked_by_open_clip):
    ours, theirs = built(lr_scale), built(None)
    locked_by_open_clip(theirs.task.model)
    assert trained(ours.task.model) == trained(theirs.task.model) == set(ours.state.optimizer.names)
    expected = gradients(theirs)
    for name, gradient in gradients(ours).items():
        assert torch.equal(gradient, expected.pop(name))
    assert not expected


def small(kind, **vision):
    vision = {"image_size": 32, "patch_size": 8, "width": 64, "layers": 1, **vision}
    text = {"context_length": 8, "vocab_size": 64, "width": 64, "layers": 1, "heads": 1}
    return kind(embed_dim=16, vision_cfg=vision, text_cfg=text)


def test_towers_are_those_of_open_clips_other_class():
    model = small(open_clip.model.CustomTextCLIP, timm_model_name=None)
    lock(model, {"image": 0})
    assert trained(model) == {n for n in trained(model) if n.startswith(("text.", "logit_"))}
    lock(model, {"text": 0})
    assert trained(model) == {"logit_scale"}


@pytest.mark.parametrize(
    "changes",
    [
        {"accumulate": 2, **INT8},
        {"checkpointing": True, **INT8},
        {"precision.recipe": "switchback_m", "precision.backend": "reference"},
    ],
    ids=str,
)
def test_gradients_of_the_others_are_those_without_locking(built, changes):
    full = gradients(built(None, changes))
    for lr_scale in LOCKS:
        own = gradients(built(lr_scale, changes))
        assert own and len(own) < len(full), lr_scale
        for name, gradient in own.items():
            close = torch.allclose(gradient, full[name], rtol=1e-6, atol=1e-8)
            assert close, f"{name} with {lr_scale}"


def test_a_locked_tower_saves_nothing_for_backward(built):
    ours = built({"image": 0}, INT8)
    ours.task.model.train()
    batch = next(ours.batches_from(1))
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda x: x):
        features = ours.task.model.encode_image(ours.task.normalize(batch.images))
    assert not packed and not features.requires_grad


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_rates_are_scaled_and_the_longest_pattern_counts(built, kind):
    """Tensors, which a captured step reads, are changed in place."""
    scales = {"image": 0.1, "visual.conv1": 2.0, "visual.c*": 0.5, "text": 3.0}
    optimizer = built(scales).state.optimizer
    tensors = [kind(0.0) for _ in optimizer.param_groups]
    for group, tensor in zip(optimizer.param_groups, tensors, strict=True):
        group["lr"] = tensor
    set_learning_rate(optimizer, 2.0)
    pairs = zip(optimizer.param_groups, tensors, strict=True)
    assert all(group["lr"] is tensor for group, tensor in pairs) == (kind is torch.tensor)
    rates = {
        name: (pytest.approx(float(group["lr"])), group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert rates["visual.proj"] == (0.2, 0.2) and rates["visual.ln_post.bias"] == (0.2, 0.0)
    assert rates["visual.conv1.weight"] == (4.0, 0.2)
    assert rates["visual.class_embedding"] == (1.0, 0.0)
    assert rates["text_projection"] == (6.0, 0.2) and rates["logit_scale"] == (2.0, 0.0)
    assert optimizer.names == built(None).state.optimizer.names
    assert len(built(None).state.optimizer.param_groups) == 2


@pytest.mark.parametrize(
    ("lr_scale", "fault"),
    [
        ({"visul": 0}, "'visul' matches no module and no parameter; nearest: visual"),
        ({"*": 0}, "no parameter would be trained"),
    ],
)
def test_patterns_that_match_nothing_or_all_are_refused(built, lr_scale, fault):
    with pytest.raises(ConfigError, match="optimizer.lr_scale") as refused:
        built(lr_scale)
    assert fault in str(refused.value)


def test_batch_norm_is_refused():
    model = small(open_clip.model.CLIP, layers=(1, 1, 1, 1))
    with pytest.raises(ValueError, match="visual.bn1 is batch norm"):
        lock(model, {"image": 0})


def test_values_are_numbers_and_equal_ones_have_one_identity(make_config):
    for value in (-1, "x", None, math.nan):
        with pytest.raises(ConfigError, match="lr_scale.visual=.*: a finite number >= 0 is"):
            make_config({"optimizer.lr_scale": {"visual": value}})
    with pytest.raises(ConfigError, match=r"the whole map is expected: 'optimizer.lr_scale=\{"):
        compose_command(["optimizer.lr_scale.visual=0.1"])

    def of(text):
        return digest(compose_command([f"optimizer.lr_scale={text}"])[0].config, {})

    assert of("{visual:0,text:1}") == of("{text:1.0,visual:0.0}") != of("{visual:0.5,text:1}")
    assert of("null") == of("{}") == digest(compose_command([])[0].config, {})


LOCKED = {"optimizer.lr_scale": {"image": 0, "text_projection": 0.5}, "num_steps": 8}


@pytest.fixture(scope="module")
def locked_run(tiny_config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("locked")
    more = {"optimizer.name": "stable_adamw", "optimizer.clip_threshold": 1, "accumulate": 2}
    config = tiny_config(folder, {**LOCKED, **more})
    entry.main(config)
    [run] = find_runs(folder)
    assert read_config(run) == config
    return run


def test_a_locked_run_records_and_saves_only_what_it_trains(locked_run):
    for _, statistics, names in read_tensors(locked_run):
        assert names and not any(name.startswith("visual") for name in names)
        assert (statistics["rms"] > 0).all()
    checkpoint = list_checkpoints(locked_run)[-1]
    moments = load_file(checkpoint / "exp_avg.safetensors")
    assert moments and not any(name.startswith("visual") for name in moments)
    initial = build(read_config(locked_run), None).task.model
    saved = load_file(checkpoint / "model.safetensors")
    for name, p in initial.named_parameters():
        assert torch.equal(p, saved[name]) == name.startswith("visual"), name
    rows = read_rows(locked_run / "metrics.jsonl")
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_locked_run_is_exported_evaluated_replayed_and_analyzed(locked_run, tmp_path, capsys):
    exported = tmp_path / "exported"
    export.main(export.ExportConfig(str(locked_run), str(exported)))
    model = open_clip.create_model(f"local-dir:{exported}")
    saved = load_file(list_checkpoints(locked_run)[-1] / "model.safetensors")
    assert all(torch.equal(p, saved[name]) for name, p in model.named_parameters())
    replay.main(replay.ReplayConfig(str(locked_run), 7, 2, perturbed=0), ["optimizer.beta2=0.5"])
    assert "recorded losses exactly" in capsys.readouterr().out
    with pytest.raises(RunError, match="lr_scale"):
        changes = ["optimizer.lr_scale={visual:1}"]
        replay.main(replay.ReplayConfig(str(locked_run), 7, 2, perturbed=0), changes)
    assert "optimizer.lr_scale.image" in comparison.columns(load_runs(locked_run).runs)
