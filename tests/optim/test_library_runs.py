"""Runs with optimizers of libraries: recorded, and resumed to the byte."""

import pytest
import torch
from safetensors.torch import load_file

from lowprec.clip.export import fold
from lowprec.clip.model import StableEmbedding
from lowprec.config.check import ConfigError
from lowprec.config.schema import LIBRARIES
from lowprec.data.open import open_data
from lowprec.runs.attempts import CheckpointError
from lowprec.train.build import build
from lowprec.train.checkpoint import list_checkpoints


def bytes_of(run):
    """The record's files, but for what depends on the clock."""
    files = sorted(path.name for path in run.glob("*.parquet"))
    assert files == ["blocks.parquet", "details.parquet", "tensors.parquet"]
    return [(run / name).read_bytes() for name in ("metrics.jsonl", *files)]


def tensors_of(run):
    return {
        (path.name, name): tensor
        for path in list_checkpoints(run)[-1].glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def resumes(config, run_once, tmp_path):
    """Holds an interrupted run against an undisturbed one; the tensors of the last checkpoint."""
    run_once(config, tmp_path / "whole")

    def crash(built):
        raise RuntimeError("pulled the plug")

    with pytest.raises(RuntimeError, match="pulled the plug"):
        run_once(config, tmp_path / "cut", at={7: crash})
    torch.manual_seed(12345)  # the resumed attempt must not lean on the process's random state
    ended, _ = run_once(config, tmp_path / "cut")
    assert ended.state == "finished"
    assert bytes_of(tmp_path / "whole") == bytes_of(tmp_path / "cut")
    whole, cut = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    assert all(torch.equal(whole[key], cut[key]) for key in whole)
    return whole


@pytest.mark.parametrize(
    "name, scaler", [("muon", "none"), ("adagc", "fixed"), ("stable_spam", "fixed")]
)
def test_a_resumed_run_is_bitwise_the_undisturbed_one(
    name, scaler, make_config, run_once, tmp_path
):
    pytest.importorskip(LIBRARIES[name][0])
    changes = {"optimizer.name": name, "optimizer.zclip": 1.0, "scaler.name": scaler}
    changes |= {"diagnostics.statistics": ["grad_norm"], "diagnostics.detail_every": 3}
    changes |= {"precision.autocast": "fp16"} if scaler == "fixed" else {}
    config = make_config(changes | {"diagnostics.block_every": 4})
    whole = resumes(config, run_once, tmp_path)
    kinds = {file.partition(".")[0] for file, _ in whole}
    moments = {"exp_avg", "exp_avg_sq"}
    own = {"muon": {"momentum_buffer"}, "adagc": {"gamma"}}.get(name, set())
    own |= {"m_norm_t", "v_norm_t", "m_max_t"} if name == "stable_spam" else set()
    assert kinds == {"model", "rng", "clipping", *moments, *own}
    assert all(tensor.isfinite().all() for tensor in whole.values())


def test_the_state_of_another_optimizer_is_refused(make_config, run_once, tmp_path):
    run_once(make_config({"optimizer.name": "muon", "num_steps": 1}), tmp_path / "muon")
    run_once(make_config({"num_steps": 1}), tmp_path / "adamw")
    for saved, name, kinds in (("muon", "adamw", "momentum_buffer"), ("adamw", "muon", "exp_avg")):
        config = make_config({"optimizer.name": name})
        state = build(config, open_data(config)).state
        with pytest.raises(CheckpointError, match=f"another optimizer's: it has exp_avg.*{kinds}"):
            state.load(list_checkpoints(tmp_path / saved)[-1])


def test_a_pattern_without_a_match_is_a_fault_of_the_config(make_config):
    config = make_config({"optimizer.optim_bits": 8, "optimizer.override_32bit": ["visaul"]})
    with pytest.raises(ConfigError, match="override_32bit: 'visaul' matches no module"):
        build(config, open_data(config))


def test_a_stable_embedding_has_32_bit_moments(make_config):
    config = make_config({"optimizer.optim_bits": 8, "optimizer.stable_embedding": True})
    moments = build(config, open_data(config)).state.optimizer.tensors()["exp_avg"]
    assert moments["token_embedding.weight"].dtype == torch.float32
    assert moments["visual.transformer.resblocks.0.mlp.c_fc.weight"].dtype == torch.uint8


def test_stable_embedding_folds_into_the_plain_model(make_config):
    config = make_config({"optimizer.stable_embedding": True})
    stable = build(config, open_data(config)).task.model
    plain = build(make_config(), open_data(config)).task.model
    assert isinstance(stable.token_embedding, StableEmbedding)
    weight = stable.token_embedding.weight
    bound = (6 / sum(weight.shape)) ** 0.5  # Xavier's; uniform between it and its negative
    assert 0.99 * bound < weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)
    torch.nn.init.normal_(stable.token_embedding.norm.weight)
    torch.nn.init.normal_(stable.token_embedding.norm.bias)
    folded = fold(stable.state_dict())
    assert sorted(folded) == sorted(plain.state_dict())
    plain.load_state_dict(folded)
    tokens = torch.randint(512, (4, 8))
    torch.testing.assert_close(plain.encode_text(tokens), stable.encode_text(tokens))
    assert fold(folded) == folded


def test_weights_of_a_stable_embedding_leave_under_open_clips_names(
    make_config, run_once, tmp_path
):
    config = make_config({"optimizer.stable_embedding": True, "num_steps": 1})
    stable = run_once(config, tmp_path / "run")[1].task.model
    config = make_config({"model.init_from": str(tmp_path / "run")})
    plain = build(config, open_data(config)).task.model
    tokens = torch.randint(512, (4, 8))
    torch.testing.assert_close(plain.encode_text(tokens), stable.encode_text(tokens))
