"""Checks a composed config against the schema and reports all of its faults at once.

A fault is one sentence that names the key, what is allowed and the nearest valid name. The check
uses no data, GPU or torch, so a typo costs a second, not a place in a queue.
"""

import json
import math
import operator
import re
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from lowprec.config.combinations import combination_faults
from lowprec.config.schema import REMOVED_OPTIMIZERS, Config
from lowprec.nearest import nearest, some

MISSING = "???"
START_OVER = "; to start a run over, delete its directory or choose another name="
PASSWORD = re.compile(r"(?<=//)[^/\s@]*:[^/\s]*@")  # user and password of a URL
COMPARE = {"least": operator.ge, "above": operator.gt, "most": operator.le, "below": operator.lt}
IN_DIGESTS = {  # keys of old records, with the value that digests of runs contain
    "distributed.gather_with_grad": True,
    "distributed.local_loss": True,
    "distributed.static_graph": True,
    "distributed.sync_bn": False,
    "optimizer.stable_embedding": False,
}
REMOVED = {  # keys of old records, with their defaults
    **IN_DIGESTS,
    "optimizer.on_warning": {"action": "none", "statistic": "rms", "threshold": 2.3, "beta2": 0.9},
    "data.scaled_decoding": False,
    "profile": False,
    "remote_sync": None,
    "resume.from": None,
}
REMOVED_CHOICES = {"optimizer.name": REMOVED_OPTIMIZERS}  # accepted in old records


class ConfigError(ValueError):
    """The faults of a config, as a list of sentences."""

    def __init__(self, faults: Iterable[str]):
        self.faults = list(dict.fromkeys(PASSWORD.sub("***@", fault) for fault in faults))
        super().__init__("\n".join(f"  - {fault}" for fault in self.faults))


class RunError(RuntimeError):
    """A run cannot be made or read; the user sees the message without a traceback."""


def check(raw: dict, schema: type = Config, *, is_record: bool = False) -> Any:
    """Builds `schema` from nested plain data; raises ConfigError with every fault.

    Keys of REMOVED are dropped, in a record whatever their value, and configs with `retired_faults`
    are accepted, so that the configs of old runs can be read; `compose_command` and `train_run`
    refuse them.
    """
    faults: list[str] = []
    for key in REMOVED if is_record else ():
        raw = _without(raw, *key.split("."))
    legal = list(keys(schema))
    config = _build(schema, raw, "", legal, faults)
    if not faults and issubclass(schema, Config) and not retired_faults(config):
        faults.extend(combination_faults(config))
    if faults:
        raise ConfigError(faults)
    return config


def _without(raw: Any, name: str, *rest: str) -> Any:
    """Nested plain data without a key, whose names are given from the outside in."""
    if not isinstance(raw, dict) or name not in raw:
        return raw
    others = {key: value for key, value in raw.items() if key != name}
    return {**others, name: _without(raw[name], *rest)} if rest else others


def retired_faults(config: Config) -> list[str]:
    """Why a config of an old record can no longer be trained; empty for any other config."""
    name = config.optimizer.name
    if name not in REMOVED_OPTIMIZERS:
        return []
    instead = "adamw optimizer.optim_bits=8" if "8bit" in name else "adamw_zclip"
    return [f"optimizer.name={name} was removed; use optimizer={instead}"]


def removed_settings(raw: dict) -> list[str]:
    """Keys of a record that changed its training and are no longer known, so not repeated."""
    found = []
    for key in ("optimizer.on_warning", "data.scaled_decoding", *IN_DIGESTS):
        group, _, name = key.partition(".")
        default, value = REMOVED[key], (raw.get(group) or {}).get(name, REMOVED[key])
        if isinstance(value, dict) and isinstance(default, dict):
            value = default | value
        found += [key] if value != default else []
    return found


def keys(schema: type, prefix: str = "") -> Iterator[str]:
    """All dotted keys of a schema, groups and leaves."""
    for f in fields(schema):
        path = prefix + f.name
        if is_dataclass(f.type):
            yield path
            yield from keys(f.type, path + ".")
        else:
            yield path


def unknown_key(path: str, legal: Iterable[str]) -> str:
    """The fault for a key that the schema does not have; the nearest key comes first."""
    root = path.partition(".")[0]
    if root in ("launcher", "dry_run") and root not in legal:
        return f"{path}: only experiments.sweep has this key"
    group = path.rpartition(".")[0]
    siblings = [k.rpartition(".")[2] for k in legal if k.rpartition(".")[0] == group]
    allowed = f" ({group or 'the root'} has {some(siblings, path)})" if siblings else ""
    return f"{path}: no such key{nearest(path, legal)}{allowed}"


def allows(path: str, value: Any, schema: type = Config) -> bool:
    """Whether a key of a config may have a value; choices are not looked at."""
    name, _, rest = path.partition(".")
    f = next(f for f in fields(schema) if f.name == name)
    if rest:
        return allows(rest, value, f.type)
    kind, is_optional = _kind(f)
    if value is None:
        return is_optional
    if container := typing.get_origin(kind):
        return isinstance(value, container)
    is_of_kind = type(value) is kind or kind is float and type(value) is int
    return is_of_kind and _within(value, _bounds(f))


def settings(config: dict) -> tuple[dict, list[str]]:
    """Values by dotted key, and a fault for each that the schema does not have or allow.

    Choices are not looked at, as in the records of other trainers.
    """
    legal, known, faults = list(keys(Config)), {}, []
    for key, value in _dotted(config, legal).items():
        if key not in legal:
            faults.append(unknown_key(key, legal))
        elif not allows(key, value):
            faults.append(f"{key}={_written(value)}: not allowed")
        else:
            known[key] = value
    return known, faults


def _dotted(config: dict, legal: list[str], prefix: str = "") -> dict:
    """Groups of keys as dotted keys; the maps that are values stay."""
    dotted = {}
    for name, value in config.items():
        path = f"{prefix}{name}"
        is_group = isinstance(value, dict) and any(key.startswith(f"{path}.") for key in legal)
        dotted |= _dotted(value, legal, f"{path}.") if is_group else {path: value}
    return dotted


def _build(schema: type, raw: Any, prefix: str, legal: list[str], faults: list[str]) -> Any:
    if not isinstance(raw, dict):
        inside = ", ".join(f.name for f in fields(schema))
        fault = f"{prefix[:-1]}={_written(raw)}: a group of keys is expected ({inside})"
        faults.append(fault + START_OVER * (prefix == "resume."))
        return None
    names = {f.name: f for f in fields(schema)}
    paths = {prefix + str(name): value for name, value in raw.items() if name not in names}
    unknown = [path for path, v in paths.items() if path not in REMOVED or v != REMOVED[path]]
    faults.extend(unknown_key(path, legal) for path in unknown)
    values = {}
    for name, f in names.items():
        path = prefix + name
        if is_dataclass(f.type):
            values[f.name] = _build(f.type, raw.get(name, {}), path + ".", legal, faults)
        elif name in raw:
            values[f.name] = _value(path, raw[name], f, faults)
    return None if faults else schema(**values)


def _value(path: str, value: Any, f: Any, faults: list[str]) -> Any:
    """Converts a value to its field's type, such as an int to a float; appends faults."""
    if value == MISSING or (value == "" and f.default == MISSING):
        faults.append(f"{path} is required: {f.metadata['doc']}")
        return None
    kind, is_optional = _kind(f)
    if value is None and is_optional:
        return None
    container = typing.get_origin(kind)
    if container is None:
        return _element(path, value, kind, f, faults)
    if not isinstance(value, container):
        faults.append(f"{path}={_written(value)}: {_expectation(f, value, kind)} is expected")
        return None
    inner = typing.get_args(kind)[-1]
    if container is list:
        return [_element(path, item, inner, f, faults) for item in value]
    return {str(k): _element(f"{path}.{k}", v, inner, f, faults) for k, v in value.items()}


def _element(path: str, item: Any, kind: type, f: Any, faults: list[str]) -> Any:
    choices = f.metadata["choices"]
    if isinstance(item, str) and PASSWORD.search(item):
        faults.append(
            f"{path}={item}: a password in a URL would be written into the run's record; put it "
            "into ~/.netrc and the line `netrc` into ~/.curlrc"
        )
    if type(item) is int and (kind is str or kind is float and abs(item) < 1e300):
        item = kind(item)  # a folder's name may be a number
    if choices and item not in (*choices, *REMOVED_CHOICES.get(path, ())):
        allowed = ", ".join(map(str, choices))
        near = nearest(str(item), choices)
        faults.append(f"{path}={_written(item)}: one of {allowed} is expected{near}")
    elif type(item) is not kind or not _within(item, _bounds(f)):
        doc = f.metadata["doc"]
        faults.append(f"{path}={_written(item)}: {_expectation(f, item, kind)} is expected ({doc})")
    return item


def _written(value: Any) -> str:
    """A value as on a command line: `null`, `true`, text in quotes."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _within(item: Any, bounds: dict[str, float]) -> bool:
    if isinstance(item, float) and not math.isfinite(item):
        return False
    return all(COMPARE[name](item, bound) for name, bound in bounds.items())


def _expectation(f: Any, item: Any, kind: Any) -> str:
    """What a field, or an element of type `kind`, allows, in words: `a number > 0 or null`."""
    words = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    names = ",".join(map(str, f.metadata["choices"][:2])) or "a,b"
    words |= {list[str]: f"a list such as [{names}]", dict: "a map"}
    words |= {dict[str, float]: "a map of names to numbers"}
    signs = {"least": ">=", "above": ">", "most": "<=", "below": "<"}
    own, is_optional = _kind(f)
    is_large = isinstance(item, int | float) and item >= 2**31
    bounds = _bounds(f) if is_large else f.metadata["bounds"]
    limits = " and ".join(f"{signs[n]} {bound}" for n, bound in bounds.items())
    return f"{words[kind]} {limits}".strip() + " or null" * (is_optional and kind == own)


def _bounds(f: Any) -> dict[str, float]:
    """A field's bounds; a whole number without an upper bound is below 2**31."""
    bounds = f.metadata["bounds"]
    is_open = _kind(f)[0] is int and not {"most", "below"} & bounds.keys()
    return bounds | ({"below": 2**31} if is_open else {})


def _kind(f: Any) -> tuple[type, bool]:
    """A field's type without None, and whether None is allowed."""
    kinds = typing.get_args(f.type) if isinstance(f.type, types.UnionType) else (f.type,)
    return kinds[0], type(None) in kinds
