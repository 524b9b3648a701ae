"""Composes the checked config of each run that a command line asks for.

Hydra stops at the first fault with its own message. The functions here find the faults of all runs
at once, before anything else happens; what they return is what runs. No other module reads the
files below `conf/`, and only `overrides` parses Hydra's grammar.
"""

import copy
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lowprec.config.check import ConfigError, check, retired_faults
from lowprec.config.combinations import open_clip_models
from lowprec.config.overrides import key_of, parse, parse_or_fault, single_faults
from lowprec.config.schema import MAPS, PRESETS, Config
from lowprec.nearest import nearest, some

CONF = Path(__file__).parents[2] / "conf"
HEADER = re.compile(r"\s*#\s*@package\s+_global_\s*$", re.MULTILINE)  # as Hydra reads it
PATTERNS = ("data.train", "data.val", "shards", "train", "val")  # keys whose values are globs
HYDRA = ("hydra/launcher", "hydra.launcher.*")  # Hydra's own keys that are allowed
MAX_RUNS = 1000  # of a sweep
FURTHER = "further_commands"  # key of an experiment file: overrides of each further command


@dataclass(frozen=True)
class ComposedRun:
    """The single overrides of one run, such as `seed=0`, and its checked config."""

    overrides: tuple[str, ...]
    config: Any


def compose_command(
    overrides: list[str],
    entry: str = "train",
    schema: type = Config,
    *,
    multirun: bool = False,
    preflight: Callable[[Any], None] = lambda config: None,
    base: dict | None = None,
) -> list[ComposedRun]:
    """The runs that a command line asks for; ConfigError with the faults of all of them.

    `entry` is the command's name, see `config_file`; `preflight(config)` may raise ConfigError with
    further faults. `base` is a config that the overrides change; else they change the defaults.
    """
    faults: list[str] = []
    runs = _expand(overrides, schema, faults)
    if not multirun and (len(runs) > 1 or len(runs[0]) > len(overrides)):  # a file sweeps
        command = f"python -m experiments.{entry} -m {shlex.join(overrides)}"
        faults += single_faults(overrides) if entry == "sweep" else [f"this is a sweep: {command}"]
        runs = runs[:1]
    composed = []
    for run in runs:
        try:
            config = check(_compose(run, entry, schema, base), schema)
            if isinstance(config, Config):
                faults += retired_faults(config)
            if homes := _home_faults(asdict(config), base):
                raise ConfigError(homes)
            preflight(config)
            composed.append(ComposedRun(run, config))
        except ConfigError as error:
            faults += error.faults
    if faults:
        raise ConfigError(faults)
    return composed


def _expand(overrides: list[str], schema: type, faults: list[str]) -> list[tuple[str, ...]]:
    """The single overrides of each run that a command line asks for, in the order they run.

    Appends a fault for each override that cannot be read or names no key or choice.
    """
    command_line = _axes(overrides, schema, faults)
    experiment = _experiment(command_line, schema, faults)
    swept = _axes([f"{key}={v}" for key, v in _swept_keys(experiment).items()], schema, faults)
    runs = []
    for command in [[], *_further(experiment, command_line)]:
        fixed = command_line + _axes(command, schema, faults)
        names = {key_of(axis[0]) for axis in fixed}
        axes = fixed + [axis for axis in swept if key_of(axis[0]) not in names]
        runs += itertools.islice(itertools.product(*axes), MAX_RUNS + 1)
    if len(runs) > MAX_RUNS:
        faults.append(f"this sweep has more than {MAX_RUNS:,} runs")
        return runs[:1]
    return runs


def differing_values(runs: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """By key, the values of each run's overrides that not all runs share."""
    shared = set.intersection(*map(set, runs)) if runs else set()
    own = [[text for text in run if text not in shared] for run in runs]
    return [{key_of(text): text.partition("=")[2] for text in texts} for texts in own]


def explain(entry: str, schema: type) -> str:
    """A line per key of an entry point, `key=default`, followed by its meaning and choices.

    Below, a line per group, with the names that `group=name` chooses from.
    """

    def lines(schema: type, values: dict, prefix: str) -> Iterator[str]:
        for f in fields(schema):
            name = f.name
            value, doc = values[name], f.metadata.get("doc", "")
            if is_dataclass(f.type):
                yield from lines(f.type, value, f"{prefix}{name}.")
                continue
            text = value if isinstance(value, str) else json.dumps(value)
            choices = " | ".join(map(str, f.metadata.get("choices", ())))
            yield f"{prefix}{name}={text}  {doc}" + f" ({choices})" * bool(choices)

    text = "\n".join(lines(schema, _plain(_compose_files(CONF, (), entry, schema)), ""))
    groups = [f"{group}: {', '.join(_choices(group, schema))}" for group in sorted(_groups(schema))]
    return "\n".join([text, "", "Groups (group=choice):", "", *groups] if groups else [text])


def register(schema: type) -> None:
    """Makes a schema's defaults the base config that the files in `conf/` name `schema`."""
    ConfigStore.instance().store(name="schema", node=asdict(schema()))


def _compose(run: tuple[str, ...], entry: str, schema: type, base: dict | None) -> dict:
    """Hydra's composition of single overrides, as nested plain data.

    Hydra applies overrides of values after all files, so runs that choose the same files share
    what these compose to. Of a `base`, a chosen file changes the keys that any file of its group
    sets: a run that is replayed with another optimizer keeps its learning rate.
    """
    groups = _groups(schema)
    parsed = [(text, parse(text)) for text in run if not text.startswith("hydra")]
    choices = {o.key_or_group: text for text, o in parsed if o.key_or_group in groups}
    try:
        composed = copy.deepcopy(_compose_files(CONF, tuple(choices.values()), entry, schema))
        if base is not None:
            chosen = {group: composed[group] for group in choices}
            composed = OmegaConf.create(copy.deepcopy(base))
            for group, values in chosen.items():
                own = values.keys() & _keys_of_files(group)
                composed[group].update({key: values[key] for key in own})
        OmegaConf.set_struct(composed, False)  # `check` refuses unknown keys
        for _, override in parsed:
            if override.key_or_group not in groups:
                key = override.key_or_group  # a whole map takes the place of a file's
                OmegaConf.update(composed, key, override.value(), merge=key not in MAPS)
        data = _plain(composed)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError([" ".join(str(error).split())[:400]]) from error
    if faults := [_unresolved(key, text) for key, text in _texts(data) if "${" in text]:
        raise ConfigError(faults)
    return data


def _plain(composed: Any) -> dict:
    """A composed config as nested plain data; ${...} stays text, missing values stay "???"."""
    data = OmegaConf.to_container(composed, resolve=False, throw_on_missing=False)
    data.pop(FURTHER, None)
    return data


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The key and the text of each string in nested plain data."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _texts(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item, key)


def _home_faults(data: dict, base: dict | None) -> list[str]:
    """A fault for each new path below `~`, which would be made in a folder of this name."""
    texts = [(key, text) for key, text in _texts(data) if text[:1] == "~" and key != "remark"]
    paths = {key: text for key, text in texts if (key, text) not in _texts(base or {})}
    homes = {key: os.path.expanduser(text) for key, text in paths.items()}
    return [
        f"{key}={text}: ~ is not expanded: write {homes[key]}"
        for key, text in paths.items()
        if homes[key] != text
    ]


def _unresolved(key: str, text: str) -> str:
    return (
        f"{key}={text}: ${{...}} is not resolved, since its value would be written into files; "
        "let the shell fill it in"
    )


def _keys_of_files(group: str) -> set[str]:
    files = [OmegaConf.load(CONF / group / f"{choice}.yaml") for choice in _choices(group)]
    return {key for file in files for key in file}


@cache
def _compose_files(conf: Path, choices: tuple[str, ...], entry: str, schema: type) -> DictConfig:
    register(schema)
    with hydra.initialize_config_dir(version_base="1.3", config_dir=str(conf)):
        return hydra.compose(config_file(entry, schema), overrides=list(choices))


def config_file(entry: str, schema: type) -> str:
    """The name of an entry point's config file in `conf/`: its own, the one of runs, or `tool`."""
    own = "train" if issubclass(schema, Config) else entry
    return own if (CONF / f"{own}.yaml").exists() else "tool"


def launcher_settings(overrides: list[str], entry: str, schema: type) -> dict:
    """The chosen `hydra/launcher`: its `cluster`, slurm or local, and the keys of its file.

    {} if the runs train in this process.
    """
    own = [text for text in overrides if key_of(text).startswith("hydra")]
    register(schema)
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF), job_name=entry):
            composed = hydra.compose(config_file(entry, schema), own, return_hydra_config=True)
        name = composed.hydra.runtime.choices["hydra/launcher"]
        settings = OmegaConf.to_container(composed.hydra.launcher, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([" ".join(str(error).split())[:400]]) from error
    settings.pop("_target_", None)  # of Hydra's plugin, if it is installed
    return {"cluster": name.removeprefix("submitit_"), **settings} if name != "basic" else {}


def _axes(overrides: list[str], schema: type, faults: list[str]) -> list[list[str]]:
    """For each legal override the single ones that it stands for, several in a sweep."""
    patterns = [text for text in overrides if key_of(text) in PATTERNS]
    for name in sorted({key_of(text) for text in patterns}):
        if sum(key_of(text) == name for text in patterns) > 1:  # the shell has expanded its braces
            faults.append(f"{name} is given more than once; braces need quotes: '{name}=\"...\"'")
    parsed = [parse_or_fault(text, faults) for text in overrides]
    legal = [o for o in parsed if o is not None and _is_legal(o, schema, faults)]
    axes = {key_of(o.input_line): list(_values(o)) for o in legal}  # the last of a key counts
    faults += [f"{name}: the sweep has no values" for name, values in axes.items() if not values]
    return [[f"{name}={value}" for value in values] for name, values in axes.items() if values]


def _experiment(axes: list[list[str]], schema: type, faults: list[str]) -> dict:
    """The file of the experiment that the axes choose as plain data, empty without one."""
    texts = [text for axis in axes for text in axis if key_of(text) == "experiment"]
    names = [text.partition("=")[2] for text in texts]
    files = [_study(name) for name in names]
    if len(files) > 1 and any(map(_swept_keys, files)):  # Hydra would leave their sweeps out
        faults.append(f"experiment={','.join(names)}: only one experiment can sweep at a time")
        return {}
    return files[0] if files else {}


def _study(name: str) -> dict:
    """A file of conf/experiment as plain data; ConfigError if a study cannot be read from it."""
    path = CONF / "experiment" / f"{name}.yaml"
    place = f"{path.relative_to(CONF.parent)}:"
    try:
        text = path.read_text()
        file = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        swept, further = _swept_keys(file), file.get(FURTHER) or []
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AttributeError) as error:
        raise ConfigError([f"{place} no map of keys ({' '.join(str(error).split())})"]) from error
    faults = []
    if not HEADER.match(text):
        faults.append(f"{place} its first line must be `# @package _global_`")
    if not isinstance(swept, dict):
        faults.append(f"{place} hydra.sweeper.params: a map is expected, such as {{seed: '0,1'}}")
    if not isinstance(further, list) or not all(isinstance(command, str) for command in further):
        faults.append(f"{place} {FURTHER}: a list is expected, such as ['optimizer=muon seed=0']")
    if faults:
        raise ConfigError(faults)
    return file


def _swept_keys(experiment: dict) -> dict[str, Any]:
    """The values, separated by commas, of each key that an experiment's file sweeps."""
    sweeper = (experiment.get("hydra") or {}).get("sweeper") or {}
    return sweeper.get("params") or {}


def _further(experiment: dict, axes: list[list[str]]) -> list[list[str]]:
    """The further commands of an experiment file that set no key of the command line."""
    names = {key_of(axis[0]) for axis in axes}
    commands = [text.split() for text in experiment.get(FURTHER) or []]
    return [command for command in commands if not names & set(map(key_of, command))]


def _hydra_fault(override: Override) -> str | None:
    """Why a key of Hydra itself is refused: others could write files anywhere or call functions."""
    key, launchers = override.key_or_group, ["basic", *_choices("hydra/launcher")]
    if key == "hydra/launcher" and override.value() not in launchers:
        return f"{key}={override.value()}: one of {', '.join(launchers)} is expected"
    values = [parse(f"{key}={value}").value() for value in _values(override)]
    for name, text in _texts(values, key):
        if ":" in text.partition("${")[2]:  # such as oc.env; references to Hydra's keys are allowed
            return _unresolved(name, text)
    if any(fnmatchcase(key, pattern) for pattern in HYDRA):
        return None
    return f"{key} is not allowed; of Hydra's own keys only {', '.join(HYDRA)}{nearest(key, HYDRA)}"


def _is_legal(override: Override, schema: type, faults: list[str]) -> bool:
    """Whether an override can be applied; else appends a fault. `check` finds unknown keys."""
    key = override.key_or_group
    if override.is_delete():
        faults.append(f"~{key}: a key cannot be removed from a config; leave it at its default")
        return False
    if override.value_type == ValueType.INTERVAL_SWEEP:
        faults.append(f"{key}: an interval has no list of values; use choice or range")
        return False
    if key.startswith("hydra"):
        fault = _hydra_fault(override)
        faults += [fault] if fault else []
        return fault is None
    if key in _groups(schema):
        files = _choices(key, schema)
        unknown = [choice for choice in _values(override) if choice not in files]
        folder = f"{'conf/' * issubclass(schema, Config)}{key}"
        for choice in unknown:
            near = _same_name(choice, files) if key == "model" else ""
            near = near or nearest(choice, files)
            allowed = f"({folder} has {some(files, choice)})"
            faults.append(f"{key}={choice}: no such choice{near} {allowed}")
        return not unknown
    for name in MAPS:
        if key.startswith(f"{name}."):
            faults.append(f"{key}: the whole map is expected: '{name}={{NAME:VALUE}}'")
            return False
    presets = [value for value in _values(override) if value in PRESETS]
    if issubclass(schema, Config) and key == "model.name" and presets:
        faults.append(
            f"model.name={presets[0]} names a size without setting it; use model={presets[0]}"
        )
    return True


def _same_name(choice: str, presets: list[str]) -> str:
    """`; nearest: x` for the name of a preset or of open_clip's, however it is written, or ""."""

    def plain(name: str) -> str:
        return "".join(filter(str.isalnum, name)).lower()

    models = [name for name in open_clip_models() if plain(name) == plain(choice)]
    near = [f"model={name}" for name in presets if plain(name) == plain(choice)]
    near += [f"model=open_clip model.name={name}" for name in models]
    return f"; nearest: {' or '.join(near)}" if near else ""


def _groups(schema: type) -> set[str]:
    """Keys of a schema that choose a file of `conf/<key>/`."""
    names = {f.name for f in fields(schema) if is_dataclass(f.type)}
    names |= {"experiment"} if issubclass(schema, Config) else set()
    return {name for name in names if (CONF / name).is_dir()}


def _choices(group: str, schema: type = Config) -> list[str]:
    """The files of a group; for an entry with other keys than a run's, those that it can take."""
    folders = [path for path in CONF.glob("**") if str(path.relative_to(CONF)) == group]
    files = [path for folder in folders for path in folder.glob("*.yaml")]
    if not issubclass(schema, Config):
        [kind] = [f.type for f in fields(schema) if f.name == group]
        known = {f.name: f.metadata.get("choices") for f in fields(kind)}
        files = [path for path in files if _fits(OmegaConf.load(path), known)]
    return sorted(path.stem for path in files)


def _fits(file: DictConfig, known: dict[str, tuple | None]) -> bool:
    """Whether a file sets only keys that are known, to values that are among their choices."""
    return all(key in known and value in (known[key] or [value]) for key, value in file.items())


def _values(override: Override) -> Iterator[str]:
    """The values of an override as text; a glob that matches no file stands for itself."""
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        files = override.value().filter(_choices(override.key_or_group))
        yield from files or [override.input_line.partition("=")[2]]
    elif override.is_sweep_override():
        yield from itertools.islice(override.sweep_string_iterator(), MAX_RUNS + 1)
    else:
        yield override.get_value_string()
