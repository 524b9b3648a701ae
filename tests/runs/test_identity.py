import copy
import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from lowprec.config.compose import compose_command
from lowprec.config.schema import (
    Config,
    DataConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from lowprec.runs.identity import digest, directory
from lowprec.runs.read import read_config
from tests.config.test_check import LEAVES

SOURCES = {"data": "a" * 64}
NOT_IDENTITY = {  # the design's list; of a path, what it holds is identity
    *("remark", "device", "num_workers", "run_dir", "log_every", "save_every", "keep_checkpoints"),
    *("logger.name", "diagnostics.recorder.enabled", "deterministic"),
    *("data.train", "data.val", "data.classnames", "data.templates", "data.index"),
    *("model.init_from", "resume.allow_reshard", "resume.allow_drift"),
    *("distributed.timeout_s", "data.allow_remote", "data.max_skip_rate"),
    *(f"diagnostics.spikes.{name}" for name in ("protocol", "rms_threshold", "loss_sigmas")),
    *(f"diagnostics.spikes.{name}" for name in ("num_deviations", "within", "ignore_steps")),
    *("diagnostics.spikes.window", "diagnostics.recorder.steps", "diagnostics.recorder.keep"),
    *("diagnostics.recorder.rms", "data.cache", "optimizer.paged"),
}


def changed(config, path):
    """A copy of a config with one value replaced by another."""
    config = copy.deepcopy(config)
    *groups, last = path.split(".")
    inner = config
    for group in groups:
        inner = getattr(inner, group)
    value = getattr(inner, last)
    if isinstance(value, bool):
        other = not value
    elif isinstance(value, int | float):
        other = value + 1
    elif isinstance(value, list):
        other = [*value, "other"]
    else:
        other = "other"
    setattr(inner, last, other)
    return config


def test_identity_keys_and_no_others_change_the_digest():
    config, unchanged = Config(), set()
    for key in LEAVES:
        other = changed(config, key)
        assert asdict(other) != asdict(config)
        unchanged |= {key} if digest(other, SOURCES) == digest(config, SOURCES) else set()
    assert unchanged == NOT_IDENTITY


def test_identity_of_save_every_and_num_steps_depends_on_data_and_schedule():
    stream = Config(data=DataConfig(name="stream"))  # seeded anew at each checkpoint
    assert digest(changed(stream, "save_every"), SOURCES) != digest(stream, SOURCES)
    constant = Config(schedule=ScheduleConfig(name="constant"))
    assert digest(changed(constant, "num_steps"), SOURCES) == digest(constant, SOURCES)
    assert digest(changed(constant, "seed"), SOURCES) != digest(constant, SOURCES)


def test_digest_depends_on_what_the_paths_hold_and_on_the_role():
    both = {"data": "a", "init_from": "b"}
    sources = [{"data": "a"}, {"data": "b"}, {}, both, {"init_from": "a"}]
    assert len({digest(Config(), source) for source in sources}) == len(sources)


def test_nearby_floats_have_different_digests():
    lr = 1e-3
    near = [Config(optimizer=OptimizerConfig(lr=x)) for x in (lr, math.nextafter(lr, 1))]
    assert digest(near[0], SOURCES) != digest(near[1], SOURCES)


def test_directory_has_the_study_and_the_recipe_or_under_high_the_dtype():
    for autocast, recipe, study in (
        ("fp32", "high", "mine"),
        ("bf16", "switchback", "loss_curves"),
    ):
        config = Config(run_dir="some/runs", name="mine", seed=7)
        config.precision = PrecisionConfig(autocast=autocast, recipe=recipe)
        config.experiment = None if study == "mine" else study
        name = "fp32" if recipe == "high" else recipe
        expected = f"some/runs/{study}/nano-{name}-adamw-s7-{digest(config, SOURCES)}"
        assert directory(config, SOURCES) == Path(expected)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [("adamw8bit_bnb", "eaad68225f"), ("adamw8bit_torchao", "8d96dfbf2c")],
)
def test_runs_with_8_bit_moments_keep_their_digest_and_are_read(tmp_path, optimizer, expected):
    config = compose_command([])[0].config
    config.optimizer.name, config.optimizer.override_32bit = optimizer, []
    config.diagnostics.statistics = ["grad_norm", "update_norm"]
    assert digest(config, {}) == expected
    config.optimizer.override_32bit, config.optimizer.clip_norm = ["visual.proj"], 1.0
    (tmp_path / "config.yaml").write_text(json.dumps(asdict(config)))
    assert read_config(tmp_path) == config
