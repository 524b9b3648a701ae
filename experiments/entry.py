"""Runs an entry point, after checking its whole command line."""

import argparse
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from lowprec.config import compose
from lowprec.config.check import ConfigError, RunError, check
from lowprec.config.schema import Config
from lowprec.data.sources import without_secrets
from lowprec.train.ranks import place

_swept: set[str] = set()  # keys in which the runs of this process's sweep differ
FLAGS = ("config_name", "config_path", "config_dir", "experimental_rerun")  # refused


def run_command(
    task: Callable[[Any], Any],
    entry: str,
    schema: type = Config,
    preflight: Callable[[Any], None] = lambda config: None,
) -> None:
    """Calls `task(config)` for the command line's config, or under -m for each of its runs.

    All configs are checked first, also by `preflight(config)`, which may raise ConfigError. Faults
    are printed as a list, and the exit status is 2. `entry` is the command's name.
    """
    compose.register(schema)
    arguments = parse_command()
    helps = arguments.hydra_help or arguments.help or arguments.shell_completion
    if helps:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ends quietly under `| head`
    commands: list[list[str]] = []
    differing: set[str] = set()
    try:
        if arguments.multirun and (size := place()[1]) > 1:
            instead = f"python -m experiments.sweep submit ... launcher.gpus={size}"
            raise ConfigError([f"-m does not run in {size} processes; use {instead}"])
        if not helps:
            multirun, overrides = arguments.multirun, arguments.overrides
            runs = compose.compose_command(
                overrides, entry, schema, multirun=multirun, preflight=preflight
            )
            differing = set().union(*compose.differing_values([run.overrides for run in runs]))
            if multirun and issubclass(schema, Config):
                commands = compose.further_commands(overrides)
    except ConfigError as error:
        refuse(error)
    if arguments.help:  # Hydra adds the groups
        usage = (sys.modules["__main__"].__doc__ or "").strip()
        print(f"{usage}\n\nKeys with their defaults:\n\n{compose.explain(entry, schema)}\n")

    @hydra.main(
        version_base="1.3", config_path=str(compose.CONF), config_name=compose.config_file(entry)
    )
    def run(composed: Any) -> Any:
        _swept.update(differing)  # here, since a launcher may call this in another process
        if own := differing_overrides():
            print(f"[{HydraConfig.get().job.num + 1}] {own}", flush=True)
        try:
            return task(check(compose.plain(composed), schema))
        except (ConfigError, RunError) as error:
            if arguments.multirun:  # the other runs continue
                raise
            if isinstance(error, ConfigError):
                refuse(error)
            sys.exit(str(error))

    _run_each(run, commands)


def parse_command() -> argparse.Namespace:
    """Parses the command line; refuses flags that Hydra lacks, and those that name a config.

    Keys move behind the flags, the only order that Hydra accepts.
    """
    arguments, unknown = get_args_parser().parse_known_intermixed_args()
    sys.argv[1:] = sorted(sys.argv[1:], key=arguments.overrides.__contains__)
    named = [f"--{name.replace('_', '-')}" for name in FLAGS if getattr(arguments, name)]
    faults = [f"{flag}: only configs in conf/ are read" for flag in named]
    for flag in (text.partition("=")[0] for text in unknown if text.startswith("-")):
        key = flag.strip("-").replace("-", "_")
        faults.append(f"{flag}: no such flag (--help, -m, --cfg); a key is written {key}=...")
    if faults:
        refuse(ConfigError(faults))
    return arguments


def runs_a_sweep() -> bool:
    """Whether this process trains the runs of a sweep one after another."""
    if not HydraConfig.initialized():
        return False
    job = HydraConfig.get()
    return job.mode == RunMode.MULTIRUN and "BasicLauncher" in job.launcher._target_


def run_overrides() -> list[str]:
    """The overrides of a run of a sweep, without secrets; none for a single run."""
    if not HydraConfig.initialized() or HydraConfig.get().mode != RunMode.MULTIRUN:
        return []
    return [without_secrets(text) for text in HydraConfig.get().overrides.task]


def differing_overrides() -> str:
    """The overrides in which a run of a sweep differs from the others; "" for a single run."""
    return " ".join(text for text in run_overrides() if text.partition("=")[0] in _swept)


def beside_chance(chance: dict[str, float], score: str) -> str:
    """Returns ` (chance 0.001)` for a score with a chance level, else an empty string."""
    return f" (chance {chance[score]:.2g})" if score in chance else ""


def refuse(error: ConfigError) -> NoReturn:
    """Prints the faults as a list and exits with 2."""
    print(f"{len(error.faults)} fault(s):\n{error}", file=sys.stderr)
    sys.exit(2)


def _run_each(run: Callable[[], None], commands: list[list[str]]) -> None:
    """Runs the command line and each further command; exits with 1 after all if one failed."""
    words, failed = sys.argv[1:], False
    for command in [[], *commands]:
        sys.argv[1:] = [*words, *command]
        try:
            run()
        except SystemExit as error:
            if error.code != 1:
                raise
            failed = True
    if failed:
        sys.exit(1)
