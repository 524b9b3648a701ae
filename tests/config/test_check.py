"""Tests the check of every schema field; test_compose.py tests whole commands."""

import math
from dataclasses import MISSING, asdict, fields, is_dataclass

import pytest

from lowprec.config.check import REMOVED, ConfigError, check, keys
from lowprec.config.schema import LEGAL_SCALERS, Config
from lowprec.nearest import nearest

GOOD = {"data": {"train": "train.tar", "val": "val.tar"}}


def leaves(schema, prefix=""):
    """(dotted key, field) of every key that is no group."""
    for f in fields(schema):
        path = prefix + f.name
        yield from leaves(f.type, path + ".") if is_dataclass(f.type) else [(path, f)]


LEAVES = dict(leaves(Config))
BOUNDS = [(path, *bound) for path, f in LEAVES.items() for bound in f.metadata["bounds"].items()]


def nested(path, value):
    """GOOD with one key set."""
    raw = {"data": dict(GOOD["data"])}
    *groups, last = path.split(".")
    inner = raw
    for group in groups:
        inner = inner.setdefault(group, {})
    inner[last] = value
    return raw


def faults_of(raw):
    with pytest.raises(ConfigError) as error:
        check(raw)
    return error.value.faults


def test_every_key_has_a_help_text_and_a_legal_default():
    for path, f in LEAVES.items():
        assert f.metadata["doc"].strip()
        if path not in ("data.train", "data.val"):
            value = f.default if f.default is not MISSING else f.default_factory()
            assert check(nested(path, value)) == check(GOOD)


@pytest.mark.parametrize(("path", "side", "bound"), BOUNDS)
def test_a_value_just_beyond_a_bound_is_refused_with_the_bound(path, side, bound):
    kind = int if "int" in str(LEAVES[path].type) else float
    beyond = {
        "least": bound - 1 if kind is int else math.nextafter(bound, -math.inf),
        "most": bound + 1 if kind is int else math.nextafter(bound, math.inf),
        "above": bound,
        "below": bound,
    }
    (fault,) = faults_of(nested(path, kind(beyond[side])))
    assert fault.startswith(f"{path}={kind(beyond[side])!r}: ")
    assert str(bound) in fault


@pytest.mark.parametrize(
    "value", [[["x"]], {"x": {}}, pytest.param(object(), id="object"), math.nan, math.inf], ids=repr
)
def test_a_value_of_a_wrong_type_is_refused_by_name(value):
    for path in LEAVES:
        (fault,) = faults_of(nested(path, value))
        assert fault.startswith((f"{path}=", f"{path}.x="))  # the second: in a map


def test_an_unknown_choice_is_refused_with_the_list_of_choices():
    for path, f in LEAVES.items():
        if choices := f.metadata["choices"]:
            (fault,) = faults_of(nested(path, ["no"] if "list" in str(f.type) else "no"))
            assert fault.startswith(f"{path}=")
            assert all(str(choice).lower() in fault.lower() for choice in choices)


@pytest.mark.parametrize(
    ("key", "default", "other"),
    [
        ("distributed.gather_with_grad", True, False),
        ("remote_sync", None, "s3://bucket"),
        ("optimizer.on_warning", REMOVED["optimizer.on_warning"], {"action": "skip"}),
        ("data.scaled_decoding", False, True),
    ],
)
def test_a_removed_key_is_dropped_in_a_record_and_elsewhere_with_its_old_default(
    key, default, other
):
    assert check(nested(key, default)) == check(GOOD)
    (fault,) = faults_of(nested(key, other))
    assert fault.startswith(f"{key}: no such key")
    record = nested(key, other)
    assert check(record, is_record=True) == check(GOOD)
    assert record == nested(key, other)


def test_an_unknown_key_is_refused_with_the_nearest_one():
    for path in keys(Config):
        (fault,) = [fault for fault in faults_of(nested(f"{path}_", 1)) if f"{path}_" in fault]
        assert fault.startswith(f"{path}_: no such key; nearest: {path} (")
    (fault,) = faults_of(nested("optimizer.beta3", 0.9))
    assert "beta2" in fault


def test_nearest_finds_a_key_of_another_group_by_its_last_part():
    for name in ("optimizer.lr", "optimizer.beta2"):
        assert nearest(name.partition(".")[2], keys(Config)) == f"; nearest: {name}"
    assert nearest("optimizer.learning_rate", keys(Config)) == "; nearest: optimizer.lr"
    assert nearest("zzzz", keys(Config)) == ""


@pytest.mark.parametrize("autocast", LEGAL_SCALERS)
@pytest.mark.parametrize("scaler", ["none", "dynamic", "fixed"])
def test_a_scaler_is_accepted_with_its_legal_dtypes_only(autocast, scaler):
    raw = {**GOOD, "precision": {"autocast": autocast}, "scaler": {"name": scaler}}
    if scaler in LEGAL_SCALERS[autocast]:
        assert check(raw).scaler.name == scaler
    else:
        (fault,) = faults_of(raw)
        assert all(f"scaler={legal}" in fault for legal in LEGAL_SCALERS[autocast])


def test_a_config_survives_a_round_trip_through_plain_data():
    change = {"step": 5, "recipe": None, "autocast": "fp32"}
    config = check({**nested("data.resampled", True), "seed": 3, "precision_change": change})
    assert check(asdict(config)) == config


@pytest.mark.parametrize("width", [1, 65, 1000])
def test_the_proposed_width_is_accepted(width):
    (fault,) = faults_of(nested("model.text_width", width))
    assert check(nested("model.text_width", int(fault.rpartition("=")[2])))
