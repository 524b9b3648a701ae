"""Rows survive encoding bit for bit; readers return exactly what is whole."""

import json
import math

import numpy as np
import pytest

from lowprec.config.check import ConfigError
from lowprec.runs.read import (
    decode_row,
    encode_row,
    find_runs,
    read_config,
    read_last_row,
    read_rows,
    read_status,
)


def bits(value):
    return np.float64(value).tobytes()


FLOATS = [0.0, -0.0, 0.1, 1 / 3, 5e-324, 1.7976931348623157e308, 2**53 + 1.0, math.nan, math.inf]
FLOATS += [-math.inf, np.float32(0.1), np.float64(1e-45)]


def test_values_survive_a_row_bit_for_bit_and_with_their_types():
    for value in FLOATS:
        back = decode_row(encode_row({"loss": value}))["loss"]
        assert bits(back) == bits(value)
    for value in (3, -1, True, None, "text", "ünï", ""):
        back = decode_row(encode_row({"x": value}))["x"]
        assert back == value and type(back) is type(value)


def test_row_is_one_line_of_strict_json():
    def refuse(text):
        raise AssertionError(text)

    row = {"loss": math.nan, "all": [math.inf, {"x": -math.inf}], "note": "two\nlines", "n": None}
    line = encode_row(row)
    assert line.count("\n") == 1 and line.endswith("\n")
    strict = json.loads(line, parse_constant=refuse)
    assert strict == {"loss": "nan", "all": ["inf", {"x": "-inf"}], "note": "two\nlines", "n": None}


@pytest.fixture
def rows_file(tmp_path):
    rows = [{"step": i, "loss": 1 / (i + 1), "note": "ü" * i} for i in range(5)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(encode_row, rows)))
    return path, rows


def test_every_truncation_yields_exactly_the_rows_whose_line_is_whole(rows_file):
    path, rows = rows_file
    whole = path.read_bytes()
    assert read_rows(path.with_name("none.jsonl")) == []
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = rows[: whole[:size].count(b"\n")]
        assert read_rows(path) == kept
        assert not kept or read_last_row(path) == kept[-1]


def test_runs_are_folders_with_config_and_status(tmp_path):
    whole = ("config.yaml", "status.json")
    for name, files in (("b", whole), ("a", whole), ("unfinished", whole[:1]), ("c", whole[1:])):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text('{"state": "running"}')
    assert find_runs(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]
    assert find_runs(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("seed: 1" + ":0" * 400 + ".5", "too large"),  # sexagesimal, as in YAML 1.1
        ("optimizer:\n  lr: 1" + "0" * 400, "more than 64 bits"),
        ("seed: 0\nmodel: {name: nano, heads: 1, name: mini_b}", "twice: name, heads, name"),
        ("# nothing\n", "it is empty"),
    ],
)
def test_yaml_that_stands_for_no_config_is_damage(tmp_path, text, why):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^  - run={tmp_path}: {path} is damaged: .*{why}"):
        read_config(tmp_path)


def test_a_default_stands_in_for_a_missing_or_damaged_status(tmp_path):
    default = {"state": None, "step": 0}
    assert read_status(tmp_path, default) == default
    for text, state in (("{", None), ("[1]", None), ('{"state": "running"}', "running")):
        (tmp_path / "status.json").write_text(text)
        assert read_status(tmp_path, default) == {"state": state, "step": 0}
