"""The schema and its check, for every field; whole commands are tested in test_compose.py."""

import math
import subprocess
import sys
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import pytest

from lowprec.config.check import ConfigError, check, keys, public_name
from lowprec.config.combinations import open_clip_models
from lowprec.config.schema import LEGAL_SCALERS, Config
from lowprec.nearest import nearest
from lowprec.runs.identity import to_dict

REPOSITORY = Path(__file__).parents[2]
GOOD = {"data": {"train": "train.tar", "val": "val.tar"}}


def leaves(schema, prefix=""):
    """(dotted key, field) of every key that is no group."""
    for f in fields(schema):
        path = prefix + public_name(f.name)
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


def default(f):
    return f.default if f.default is not MISSING else f.default_factory()


@pytest.mark.parametrize("path", LEAVES)
def test_every_key_has_a_help_text(path):
    assert LEAVES[path].metadata["doc"].strip()


@pytest.mark.parametrize("path", sorted(set(LEAVES) - {"data.train", "data.val"}))
def test_every_default_is_allowed(path):
    value = default(LEAVES[path])
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


@pytest.mark.parametrize("path", LEAVES)
@pytest.mark.parametrize("value", [[["x"]], {"x": {}}, object()], ids=["list", "map", "object"])
def test_a_value_of_a_wrong_type_is_refused_by_name(path, value):
    (fault,) = faults_of(nested(path, value))
    assert fault.startswith(f"{path}=")


@pytest.mark.parametrize("path", [p for p, f in LEAVES.items() if f.metadata["choices"]])
def test_an_unknown_choice_is_refused_with_the_list_of_choices(path):
    unknown = ["nonsense"] if "list" in str(LEAVES[path].type) else "nonsense"
    (fault,) = faults_of(nested(path, unknown))
    assert fault.startswith(f"{path}=")
    assert all(str(c).lower() in fault.lower() for c in LEAVES[path].metadata["choices"])


def test_a_removed_key_of_an_old_record_is_dropped_if_it_has_its_only_value():
    assert check(nested("distributed.gather_with_grad", True)) == check(GOOD)
    (fault,) = faults_of(nested("distributed.gather_with_grad", False))
    assert fault.startswith("distributed.gather_with_grad: no such key")


@pytest.mark.parametrize("path", list(keys(Config)))
def test_an_unknown_key_is_refused_with_the_nearest_one(path):
    group, _, last = path.rpartition(".")
    typo = f"{group}.{last}_" if group else f"{last}_"
    (fault,) = [fault for fault in faults_of(nested(typo, 1)) if fault.startswith(typo)]
    assert "no such key" in fault
    assert fault.endswith(f"nearest: {path}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lr", "optimizer.lr"),
        ("beta2", "optimizer.beta2"),
        ("optimizer.warmup_steps", "schedule.warmup_steps"),
        ("zzzz", ""),
    ],
)
def test_nearest_finds_a_key_of_another_group_by_its_last_part(name, expected):
    assert nearest(name, keys(Config)) == (f"; nearest: {expected}" if expected else "")


@pytest.mark.parametrize("autocast", LEGAL_SCALERS)
@pytest.mark.parametrize("scaler", ["none", "dynamic", "fixed"])
def test_a_scaler_is_accepted_with_its_legal_dtypes_only(autocast, scaler):
    raw = {**GOOD, "precision": {"autocast": autocast}, "scaler": {"name": scaler}}
    if scaler in LEGAL_SCALERS[autocast]:
        assert check(raw).scaler.name == scaler
    else:
        (fault,) = faults_of(raw)
        assert all(f"scaler={legal}" in fault for legal in LEGAL_SCALERS[autocast])


def test_an_int_becomes_a_float_for_a_float_field():
    value = check(nested("optimizer.lr", 1)).optimizer.lr
    assert value == 1 and isinstance(value, float)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("path", [p for p, f in LEAVES.items() if "float" in str(f.type)])
def test_a_float_must_be_finite(path, value):
    assert faults_of(nested(path, value))[0].startswith(f"{path}=")


def test_a_config_survives_a_round_trip_through_plain_data():
    config = check({**nested("data.resampled", True), "seed": 3})
    assert check(to_dict(config)) == config


@pytest.mark.parametrize("raw", [None, [], "text", 3])
def test_a_config_must_be_a_map(raw):
    with pytest.raises(ConfigError):
        check(raw)


@pytest.mark.parametrize("width", [1, 63, 65, 96, 1000])
def test_the_proposed_width_is_accepted(width):
    (fault,) = faults_of(nested("model.text_width", width))
    assert check(nested("model.text_width", int(fault.rpartition("=")[2])))


def test_open_clip_models_are_found_without_importing_it():
    code = (
        "import sys; from lowprec.config.combinations import open_clip_models; "
        "assert 'ViT-B-32' in open_clip_models(); assert 'open_clip' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=60)
    assert all(path.suffix == ".json" for path in open_clip_models().values())


def test_thresholds_without_a_protocol_and_two_rules_for_beta2_are_refused():
    raw = nested("diagnostics.spikes.protocol", "none")
    raw["diagnostics"]["spikes"]["window"] = 9
    raw["optimizer"] = {"beta2": 0.9, "beta2_decay": 0.5}
    assert faults_of(raw) == [
        "diagnostics.spikes.window=9 does nothing without a protocol",
        "optimizer.beta2=0.9 does nothing beside optimizer.beta2_decay",
    ]
