"""Each key of a config reaches the object that it configures."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowprec.clip.model import blocks
from lowprec.clip.vision import PatchDropout
from lowprec.config.check import ConfigError
from lowprec.config.schema import TORCH_OPTIMIZERS, PrecisionConfig
from lowprec.data import loader
from lowprec.train import build
from lowprec.train.build import emulated, is_slow, parallelize
from lowprec.train.run import train_run
from lowprec.train.step import can_capture


@pytest.mark.parametrize("capability", ["AVX2", "AVX512", "DEFAULT"])  # the last: ARM
@pytest.mark.parametrize("has_bf16", [False, True])
def test_bf16_is_slow_on_x86_without_its_unit(make_config, monkeypatch, capability, has_bf16):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
    config = make_config({"precision.autocast": "bf16"})
    assert is_slow(config, torch.device("cpu")) == (capability != "DEFAULT" and not has_bf16)
    assert not is_slow(config, torch.device("cuda"))
    assert not is_slow(make_config({"precision.autocast": "fp32"}), torch.device("cpu"))


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0)])
@pytest.mark.parametrize("recipe", ["switchback", "hw_fp8_switchback"])
def test_emulated_products_are_named(monkeypatch, recipe, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    least = {"switchback": (8, 0), "hw_fp8_switchback": (8, 9)}[recipe]
    precision = PrecisionConfig(recipe=recipe)
    assert bool(emulated(precision, torch.device("cuda"))) == (capability < least)
    text = emulated(precision, torch.device("cpu"))
    formats = {"switchback": "int8", "hw_fp8_switchback": "e4m3 and e5m2"}[recipe]
    assert f"emulates the {formats} products of {recipe}, correctly but slowly" in text
    assert text.endswith(f"compute capability {least[0]}.{least[1]} for them")
    fake = emulated(PrecisionConfig(recipe="fp8_switchback"), torch.device("cuda"))
    assert fake.startswith("fp8_switchback is fake-quantized")
    assert not emulated(PrecisionConfig(recipe="autograd_high"), torch.device("cpu"))


def test_a_run_says_once_that_its_products_are_emulated(make_config, tmp_path, capsys):
    recipes = {"precision.recipe": "switchback", "precision_change.step": 2}
    changes = {"precision_change.recipe": "high", "num_steps": 2, "run_dir": str(tmp_path)}
    train_run(make_config(recipes | changes))
    assert capsys.readouterr().out.count("emulates the int8 products of switchback") == 1


def test_optimizer_keys(built):
    keys = {"lr": 3e-4, "beta1": 0.8, "beta2": 0.7, "eps": 1e-5, "weight_decay": 0.3}
    keys |= {"name": "stable_adamw", "clip_threshold": 0.5, "clip_weight_decay": False}
    decayed, others = built(
        {f"optimizer.{k}": v for k, v in keys.items()}
    ).state.optimizer.param_groups
    for group in (decayed, others):
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.7), 1e-5)
        assert group["clip_threshold"] == 0.5 and group["clip_weight_decay"] is False
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)


def test_adamw_is_unclipped_and_adamw_clip_bounds_the_norm(built):
    plain = built().state.optimizer
    assert plain.clip_norm is None and plain.param_groups[0]["clip_threshold"] is None
    clipped = built({"optimizer.name": "adamw_clip", "optimizer.clip_norm": 0.25}).state.optimizer
    assert clipped.clip_norm == 0.25 and clipped.param_groups[0]["clip_threshold"] is None


def test_model_keys(built):
    model = built({"checkpointing": True, "model.patch_dropout": 0.5}).task.model
    assert model.visual.transformer.grad_checkpointing and model.transformer.grad_checkpointing
    assert isinstance(model.visual.patch_dropout, PatchDropout)
    zero = built({"intervention.name": "zero_init"}).task.model
    assert all((block.ls_1.gamma == 0).all() for block in blocks(zero))
    pure = built({"precision.autocast": "pure_bf16"}).task.model
    assert pure.visual.proj.dtype == torch.bfloat16 and pure.logit_scale.dtype == torch.float32


def test_seed_window_and_resampling_reach_the_order(built):
    def first(changes=None):
        return next(built(changes).batches_from(1)).labels.tolist()

    plain = first()
    assert first() == plain
    assert first({"data.resampled": True}) != plain
    assert first({"seed": 1}) != plain
    assert first({"data.window": 1}) != plain


@pytest.mark.parametrize("name", ["shards", "stream"])
def test_fast_decoding_reaches_the_decoder(built, monkeypatch, name):
    asked, decode = set(), loader.decode_image
    monkeypatch.setattr(loader, "decode_image", lambda *args: asked.add(args[3]) or decode(*args))
    for fast in (False, True):
        changes = {"data.name": name, "data.fast_decoding": fast, "num_workers": 0}
        next(built(changes).batches_from(1))
    assert asked == {False, True}


def test_only_a_compiled_gpu_step_without_host_state_is_captured(make_config):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert can_capture(make_config({"compile": True}), cuda)
    assert not can_capture(make_config({"compile": True}), cpu)
    assert not can_capture(make_config(), cuda)
    for captured in (
        {"distributed.name": "ddp"},
        {"distributed.name": "fsdp2"},
        {"checkpointing": True, "distributed.name": "ddp"},
    ):
        assert can_capture(make_config({"compile": True, **captured}), cuda)
    for host in (
        {"accumulate": 2},
        {"precision.autocast": "fp16", "scaler.name": "dynamic"},
        *({"optimizer.name": name} for name in TORCH_OPTIMIZERS),
    ):
        assert not can_capture(make_config({"compile": True, **host}), cuda)


def test_batch_norm_in_several_processes_is_refused(make_config):
    config = make_config({"distributed.name": "ddp"})
    with pytest.raises(ConfigError, match="model nano has batch norm, whose statistics"):
        parallelize(torch.nn.BatchNorm1d(3), config, SimpleNamespace(size=2, rank=0))


@pytest.mark.parametrize("width, cap_mib", [(16_000, None), (17_000, 17_000**2 * 4 / 2**20 / 40)])
def test_models_over_1_gb_are_averaged_in_40_buckets(make_config, monkeypatch, width, cap_mib):
    made = []
    monkeypatch.setattr(
        build, "DistributedDataParallel", lambda model, **options: made.append(options)
    )
    model = torch.nn.Linear(width, width, bias=False, device="meta")
    parallelize(model, make_config({"distributed.name": "ddp"}), SimpleNamespace(size=2, rank=0))
    assert made[0]["bucket_cap_mb"] == cap_mib


@pytest.mark.parametrize("kind", ["none", "fsdp2"])
def test_a_run_says_that_no_other_process_was_started(make_config, capsys, kind):
    train_run(make_config({"distributed.name": kind, "num_steps": 1}))
    said = (
        "note: distributed=fsdp2: one process; torchrun starts several" in capsys.readouterr().out
    )
    assert said == (kind == "fsdp2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named_before_data_are_opened_and_leaves_no_run(make_config, monkeypatch):
    monkeypatch.setattr("lowprec.train.run.open_data", None)
    config = make_config({"device": "cuda"})
    with pytest.raises(ConfigError, match="device=cuda: torch finds no GPU here"):
        train_run(config)
    assert not Path(config.run_dir).exists()
