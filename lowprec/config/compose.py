"""Command lines: overrides are checked, every cell of a sweep too, before Hydra starts a job.

Hydra stops at the first fault with a message of its own. Here all faults of all cells are found at
once, in about a second, and nothing has been touched.
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lowprec.config.check import ConfigError, check, keys, public_name, unknown_key
from lowprec.config.schema import PRESETS, Config
from lowprec.nearest import nearest
from lowprec.train.world import place

PATTERNS = ("data.train", "data.val", "shards", "train", "val")  # keys whose values are globs
CONF = Path(__file__).parents[2] / "conf"


def defaults(schema: type) -> dict:
    """A schema's default values as nested plain data, the base that config files override."""

    def value(f: Any) -> Any:
        if is_dataclass(f.type):
            return defaults(f.type)
        return f.default if f.default is not NO_DEFAULT else f.default_factory()

    return {public_name(f.name): value(f) for f in fields(schema)}


def main(
    task: Callable[[Any], None],
    entry: str,
    schema: type = Config,
    preflight: Callable[[Any], None] = lambda config: None,
) -> None:
    """Runs `task(config)` for the command line's config, or each cell of its sweep under -m.

    First every cell is checked, also by `preflight(config)`, which may raise ConfigError. Faults
    are printed as a list and exit with 2. `entry`: name of the config file in conf/.
    """
    ConfigStore.instance().store(name="schema", node=defaults(schema))
    arguments = get_args_parser().parse_args()
    inspecting = arguments.cfg or arguments.hydra_help or arguments.help or arguments.info
    size = place()[1]
    try:
        if arguments.multirun and size > 1:
            raise ConfigError(
                [
                    f"-m in {size} processes: a cell that fails would part them; "
                    f"python -m experiments.sweep submit ... launcher.gpus={size}"
                ]
            )
        if not inspecting:
            check_command(
                arguments.overrides,
                entry,
                schema,
                multirun=arguments.multirun,
                preflight=preflight,
            )
    except ConfigError as error:
        refuse(error)

    @hydra.main(version_base="1.3", config_path=str(CONF), config_name=entry)
    def run(composed: Any) -> None:
        if arguments.multirun:
            job = HydraConfig.get()
            print(f"[{job.job.num + 1}]", *job.overrides.task, flush=True)
        try:
            task(check(plain(composed), schema))
        except ConfigError as error:
            if arguments.multirun:  # the other cells go on
                raise
            refuse(error)
        except RunError as error:
            if arguments.multirun:
                raise
            sys.exit(str(error))

    run()


class RunError(RuntimeError):
    """A run that cannot go on, in a sentence for its user; no traceback is shown."""


def refuse(error: ConfigError) -> NoReturn:
    """Prints the faults as a list and exits with 2."""
    print(f"{len(error.faults)} fault(s) in the config:\n{error}", file=sys.stderr)
    sys.exit(2)


def plain(composed: Any) -> dict:
    """A composed config as nested plain data; values that are missing stay "???"."""
    return OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)


def check_command(
    overrides: list[str],
    entry: str,
    schema: type = Config,
    *,
    multirun: bool = False,
    preflight: Callable[[Any], None] = lambda config: None,
) -> list[Any]:
    """The configs of every cell that the overrides ask for; raises ConfigError with all faults."""
    faults: list[str] = []
    chosen = axes(overrides, schema, faults)
    swept = sweeper_params(chosen, schema, faults)
    if not multirun and (swept or any(len(choices) > 1 for choices in chosen)):
        command = " ".join(f"'{o}'" if set(o) & set(" *{}[]()$?") else o for o in overrides)
        faults.append(f"this is a sweep: python -m experiments.{entry} -m {command}")
    given = {_key(choices) for choices in chosen}
    chosen += [choices for choices in swept if _key(choices) not in given]
    configs = []
    for cell in itertools.islice(
        itertools.product(*chosen), 1 if faults and not multirun else None
    ):
        try:
            config = check(_compose(list(cell), entry), schema)
        except ConfigError as error:
            faults, config = faults + error.faults, error.config
        if config is not None:
            configs.append(config)
            try:
                preflight(config)
            except ConfigError as error:
                faults += error.faults
    if faults:
        raise ConfigError(faults)
    return configs


def axes(overrides: list[str], schema: type, faults: list[str]) -> list[list[str]]:
    """The single overrides that each legal override stands for: one, or several for a sweep."""
    patterns = [text for text in overrides if text.partition("=")[0] in PATTERNS]
    for name in {text.partition("=")[0] for text in patterns}:
        if sum(text.startswith(f"{name}=") for text in patterns) > 1:  # the shell's braces
            faults.append(f"{name} is given more than once; braces need quotes: '{name}=\"...\"'")
    parsed = [_parse(text, faults) for text in overrides]
    known = [o for o in parsed if o is not None and _is_known(o, schema, faults)]
    return [[f"{o.input_line.partition('=')[0]}={value}" for value in _values(o)] for o in known]


def _key(choices: list[str]) -> str:
    return choices[0].partition("=")[0]


def _parse(text: str, faults: list[str]) -> Override | None:
    key, sign, value = text.partition("=")
    if not key or not (sign or key.startswith("~")):
        faults.append(f"{text}: key=value is expected")
        return None
    if "_target_" in text:
        faults.append(f"{key}: _target_ is not taken; a config is data and calls nothing")
        return None
    if "${" in text:
        faults.append(
            f"{text}: ${{...}} is not filled in here, it would be written into the run's record; "
            "let the shell do it"
        )
        return None
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:
        faults.append(
            f"{text}: cannot be read; quote a value with special signs: '{key}=\"{value}\"'"
        )
        return None
    if override.value_type == ValueType.INTERVAL_SWEEP:
        faults.append(f"{text}: an interval lists no values; use choice(...) or range(...)")
        return None
    return override


def _is_known(override: Override, schema: type, faults: list[str]) -> bool:
    """Whether the key exists, and for a group whether each choice does; else a fault."""
    key = override.key_or_group
    if override.is_delete():
        faults.append(f"~{key}: nothing can be taken out of a config; leave it at its default")
        return False
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return True
    folder = CONF / key
    if key in groups(schema):
        files = sorted(path.stem for path in folder.glob("*.yaml"))
        bad = [choice for choice in _values(override) if choice not in files]
        for choice in bad:
            near = nearest(choice, files)
            faults.append(f"{key}={choice}: conf/{key} has {', '.join(files)}{near}")
        return not bad
    presets = [value for value in _values(override) if value in PRESETS]
    if schema is Config and key == "model.name" and presets:
        faults.append(
            f"model.name={presets[0]} names a size and does not set it; use model={presets[0]}"
        )
        return False
    known = list(keys(schema))
    if key in known:
        return True
    faults.append(unknown_key(key, known))
    return False


def groups(schema: type) -> set[str]:
    """Keys of a schema that choose a file of `conf/<key>/`."""
    names = {public_name(f.name) for f in fields(schema) if is_dataclass(f.type)}
    names |= {"experiment"} if schema is Config else set()
    return {name for name in names if (CONF / name).is_dir()}


def _values(override: Override) -> Iterator[str]:
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        files = sorted(path.stem for path in (CONF / override.key_or_group).glob("*.yaml"))
        yield from override.value().filter(files) or [override.input_line.partition("=")[2]]
    elif override.is_sweep_override():
        yield from override.sweep_string_iterator()
    else:
        yield override.get_value_string()


def sweeper_params(chosen: list[list[str]], schema: type, faults: list[str]) -> list[list[str]]:
    """The axes that the chosen experiment's file sweeps over, as single overrides."""
    if schema is not Config:
        return []
    names = [
        text.partition("=")[2] for axis in chosen if _key(axis) == "experiment" for text in axis
    ]
    files = [OmegaConf.load(CONF / "experiment" / f"{name}.yaml") for name in names]
    sweeps = [OmegaConf.select(file, "hydra.sweeper.params") for file in files]
    if len(sweeps) > 1 and any(sweeps):  # Hydra would leave their sweeps out
        faults.append(f"experiment={','.join(names)}: only one experiment that sweeps at a time")
        return []
    return axes([f"{k}={v}" for sweep in sweeps for k, v in (sweep or {}).items()], schema, faults)


def _compose(cell: list[str], entry: str) -> dict:
    cell = [text for text in cell if not text.startswith("hydra")]
    try:
        with hydra.initialize_config_dir(version_base="1.3", config_dir=str(CONF)):
            return plain(hydra.compose(entry, overrides=cell))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError([" ".join(str(error).split())[:400]]) from error
