import copy
import json
import math
from dataclasses import fields, is_dataclass
from pathlib import Path

import numpy as np
import pytest

from lowprec.config.check import public_name
from lowprec.config.schema import (
    Config,
    DataConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from lowprec.runs.identity import (
    decode_row,
    digest,
    directory,
    encode_row,
    find_runs,
    identity,
    label,
    precision_label,
    read_rows,
    read_status,
    to_dict,
)

SOURCES = {"data": "a" * 64}
NOT_IDENTITY = {  # the design's list; of a path, what it holds is identity
    *("device", "num_workers", "run_dir", "log_every", "save_every", "keep_checkpoints"),
    *("logger.name", "diagnostics.recorder.enabled", "remote_sync", "deterministic", "profile"),
    *("data.train", "data.val", "data.classnames", "data.templates", "data.index"),
    *(
        "model.init_from",
        "resume.from",
        "distributed.timeout_s",
        "data.allow_remote",
        "data.max_skip_rate",
        "resume.allow_reshard",
        "resume.allow_drift",
    ),
    *(f"diagnostics.spikes.{name}" for name in ("protocol", "rms_threshold", "loss_sigmas")),
    *(f"diagnostics.spikes.{name}" for name in ("num_deviations", "within", "ignore_steps")),
    *("diagnostics.spikes.window", "diagnostics.recorder.steps", "diagnostics.recorder.keep"),
}


def leaves(schema, prefix=""):
    for f in fields(schema):
        path = prefix + f.name
        yield from leaves(f.type, path + ".") if is_dataclass(f.type) else [path]


LEAVES = list(leaves(Config))
PUBLIC = {".".join(map(public_name, path.split("."))): path for path in LEAVES}


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


@pytest.mark.parametrize("key", sorted(set(PUBLIC) - NOT_IDENTITY))
def test_identity_key_changes_the_digest(key):
    config = Config()
    assert digest(changed(config, PUBLIC[key]), SOURCES) != digest(config, SOURCES)


@pytest.mark.parametrize("key", sorted(NOT_IDENTITY))
def test_other_key_leaves_the_digest_as_it_is(key):
    config = Config()
    assert digest(changed(config, PUBLIC[key]), SOURCES) == digest(config, SOURCES)
    assert to_dict(changed(config, PUBLIC[key])) != to_dict(config)


def test_save_every_is_identity_where_the_stream_is_seeded_anew_at_each_checkpoint():
    stream = Config(data=DataConfig(name="stream"))
    assert digest(changed(stream, "save_every"), SOURCES) != digest(stream, SOURCES)


def test_num_steps_is_identity_except_under_a_constant_schedule():
    constant = Config(schedule=ScheduleConfig(name="constant"))
    assert digest(changed(constant, "num_steps"), SOURCES) == digest(constant, SOURCES)
    assert digest(changed(constant, "seed"), SOURCES) != digest(constant, SOURCES)
    assert "num_steps" in identity(Config()) and "num_steps" not in identity(constant)


def test_digest_depends_on_what_the_paths_hold_and_on_the_role():
    sources = [
        {"data": "a"},
        {"data": "b"},
        {},
        {"data": "a", "init_from": "b"},
        {"init_from": "a"},
    ]
    assert len({digest(Config(), source) for source in sources}) == len(sources)


def test_digest_does_not_depend_on_the_order_of_sources():
    ordered, reversed_ = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    assert digest(Config(), ordered) == digest(Config(), reversed_)


def test_digest_is_ten_hexadecimal_digits():
    text = digest(Config(), SOURCES)
    assert len(text) == 10 and int(text, 16) >= 0


def test_nearby_floats_have_different_digests():
    lr = 1e-3
    near = [Config(optimizer=OptimizerConfig(lr=x)) for x in (lr, math.nextafter(lr, 1))]
    assert digest(near[0], SOURCES) != digest(near[1], SOURCES)


def test_label_names_model_precision_optimizer_and_seed():
    config = Config(seed=7, optimizer=OptimizerConfig(name="stable_adamw"))
    assert label(config) == "nano-bf16-stable_adamw-s7"


@pytest.mark.parametrize(
    ("autocast", "recipe", "expected"),
    [("fp32", "high", "fp32"), ("bf16", "switchback", "switchback"), ("fp16", "high", "fp16")],
)
def test_precision_label_is_the_recipe_or_under_high_the_dtype(autocast, recipe, expected):
    config = Config(precision=PrecisionConfig(autocast=autocast, recipe=recipe))
    assert precision_label(config) == expected


@pytest.mark.parametrize(("experiment", "study"), [(None, "mine"), ("loss_curves", "loss_curves")])
def test_directory_lies_under_the_experiment_or_else_the_name(experiment, study):
    config = Config(run_dir="some/runs", name="mine", experiment=experiment)
    expected = Path("some/runs") / study / f"{label(config)}-{digest(config, SOURCES)}"
    assert directory(config, SOURCES) == expected


def test_plain_data_has_public_names_and_is_json():
    plain = to_dict(Config())
    assert set(plain["resume"]) == {"from", "allow_reshard", "allow_drift"}
    assert json.loads(json.dumps(plain)) == plain


def bits(value):
    return np.float64(value).tobytes()


FLOATS = [0.0, -0.0, 0.1, 1 / 3, 5e-324, 1.7976931348623157e308, 2**53 + 1.0, math.nan, math.inf]


@pytest.mark.parametrize(
    "value", [*FLOATS, -math.inf, np.float32(0.1), np.float64(1e-45)], ids=repr
)
def test_number_survives_a_row_bit_for_bit(value):
    back = decode_row(encode_row({"loss": value}))["loss"]
    assert bits(back) == bits(value)


def test_row_is_one_line_of_strict_json():
    def refuse(text):
        raise AssertionError(text)

    row = {"loss": math.nan, "all": [math.inf, {"x": -math.inf}], "note": "two\nlines", "n": None}
    line = encode_row(row)
    assert line.count("\n") == 1 and line.endswith("\n")
    strict = json.loads(line, parse_constant=refuse)
    assert strict == {"loss": "nan", "all": ["inf", {"x": "-inf"}], "note": "two\nlines", "n": None}


@pytest.mark.parametrize("value", [3, -1, True, None, "text", "ünï", ""], ids=repr)
def test_value_that_is_no_float_survives_with_its_type(value):
    back = decode_row(encode_row({"x": value}))["x"]
    assert back == value and type(back) is type(value)


@pytest.fixture
def rows_file(tmp_path):
    rows = [{"step": i, "loss": 1 / (i + 1), "note": "ü" * i} for i in range(5)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(encode_row, rows)))
    return path, rows


def test_every_truncation_yields_exactly_the_rows_whose_line_is_whole(rows_file):
    path, rows = rows_file
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert read_rows(path) == rows[: whole[:size].count(b"\n")]


@pytest.mark.parametrize(
    "damage", [b"{", b"", b"5", b"null", b"[1]", b"\0" * 9, b"\xff", b'{"a" 1}']
)
def test_damaged_line_before_the_last_is_an_error_with_file_and_line(rows_file, damage):
    path, _ = rows_file
    lines = path.read_bytes().split(b"\n")
    lines[2] = damage
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 3 \(byte \d+\) is damaged"):
        read_rows(path)


def test_no_file_is_no_rows(tmp_path):
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_runs_are_folders_with_config_and_status(tmp_path):
    for name, files in {
        "study/b": ("config.yaml", "status.json"),
        "study/a": ("config.yaml", "status.json"),
        "study/unfinished": ("config.yaml",),
        "study/foreign": ("status.json",),
    }.items():
        (tmp_path / name).mkdir(parents=True)
        for file in files:
            (tmp_path / name / file).write_text('{"state": "running"}')
    assert find_runs(tmp_path) == [tmp_path / "study/a", tmp_path / "study/b"]
    assert find_runs(tmp_path / "study/a") == [tmp_path / "study/a"]
    assert find_runs(tmp_path / "nowhere") == []
    assert read_status(tmp_path / "study/a") == {"state": "running"}
