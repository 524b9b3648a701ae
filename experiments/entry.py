"""Runs an entry point: its command line is composed and checked once, then each run is called.

Hydra itself only explains (`--cfg job`, `--info`, `--hydra-help`, shell completion).
"""

import argparse
import contextlib
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from hydra import version
from hydra._internal.utils import _run_hydra, get_args_parser

from lowprec.config import compose
from lowprec.config.check import ConfigError, RunError
from lowprec.config.schema import MAPS, Config
from lowprec.data.sources import without_secrets
from lowprec.train.ranks import place

FLAGS = ("config_name", "config_path", "config_dir", "experimental_rerun")  # refused
EXPLAIN = ("help", "hydra_help", "shell_completion", "cfg", "info")  # flags that run nothing
MODES = ("run", "multirun", "shell_completion", "cfg", "info")  # flags that exclude each other
QUEUE = ("timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes")
QUEUE += ("name", "stderr_to_stdout")  # parameters that all of submitit's executors share
QUOTES = "\"'"


@dataclass(frozen=True)
class Sweep:
    """The sweep that the run of this process belongs to, for what it prints."""

    overrides: tuple[str, ...] = ()  # of the run, without secrets; none for a single run
    own: str = ""  # those in which it differs from the others
    is_here: bool = False  # this process trains the runs one after another


sweep = Sweep()


@dataclass(frozen=True)
class SweptRun:
    """One run of a sweep, which submitit may send to another process."""

    task: Callable[[Any], Any]
    config: Any
    number: int
    sweep: Sweep

    def __call__(self) -> None:
        """Calls the task, after a line that says which run this is."""
        global sweep
        sweep = self.sweep
        if sweep.own:
            print(f"[{self.number}] {sweep.own}", flush=True)
        self.task(self.config)

    def checkpoint(self) -> Any:
        """What submitit submits again if a signal comes before training can catch it."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def run_command(
    task: Callable[[Any], Any],
    entry: str,
    schema: type = Config,
    preflight: Callable[[Any], None] = lambda config: None,
    arguments: argparse.Namespace | None = None,
) -> None:
    """Calls `task(config)` for the command line's config, or under -m for each of its runs.

    All configs are checked first, also by `preflight(config)`, which may raise ConfigError. Faults
    are printed as a list, and the exit status is 2. `entry` is the command's name; `arguments` are
    those of the command line (`parse_command`).
    """
    arguments = arguments or parse_command()
    overrides, multirun = arguments.overrides, arguments.multirun
    explains = any(getattr(arguments, flag) for flag in EXPLAIN)
    try:
        if multirun and (size := place()[1]) > 1:
            instead = f"python -m experiments.sweep submit ... launcher.gpus={size}"
            raise ConfigError([f"-m does not run in {size} processes; use {instead}"])
        if not explains or arguments.cfg or arguments.info:
            runs = compose.compose_command(
                overrides, entry, schema, multirun=multirun, preflight=preflight
            )
        launcher = compose.launcher_settings(overrides, entry, schema) if multirun else {}
    except ConfigError as error:
        refuse(error)
    with unbroken_output():
        if explains:
            _explain(arguments, entry, schema)
        elif multirun:
            _run_each(swept_runs(task, runs, is_here=not launcher), launcher)
        else:
            try:
                task(runs[0].config)
            except ConfigError as error:
                refuse(error)
            except RunError as error:
                sys.exit(f"error: {error}")


class Unbroken:
    """A stream that drops what is written once nobody reads it."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Writes text, and returns its length."""
        self._try(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Writes what is buffered."""
        self._try(self.stream.flush)

    def _try(self, call: Callable, *arguments: str) -> None:
        try:
            call(*arguments)
        except BrokenPipeError:
            with open(os.devnull, "w") as nowhere:  # takes what is buffered, too
                os.dup2(nowhere.fileno(), self.stream.fileno())


@contextlib.contextmanager
def unbroken_output() -> Iterator[None]:
    """Lets a command go on, and succeed, when the reader of its output ends, as `| head` does."""
    stream = Unbroken(sys.stdout)
    with contextlib.redirect_stdout(stream):
        try:
            yield
        finally:
            stream.flush()


def parse_command(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses a command line, by default this process's.

    Refuses flags that Hydra lacks, and those that name a config.
    """
    arguments, unknown = get_args_parser().parse_known_intermixed_args(words)
    named = [f"--{name.replace('_', '-')}" for name in FLAGS if getattr(arguments, name)]
    faults = [f"{flag}: only configs in conf/ are read" for flag in named]
    for flag in (text.partition("=")[0] for text in unknown if text.startswith("-")):
        key = flag.strip("-").replace("-", "_")
        faults.append(f"{flag}: no such flag (--help, -m, --cfg); a key is written {key}=...")
    modes = [f"--{name.replace('_', '-')}" for name in MODES if getattr(arguments, name)]
    if len(modes) > 1:
        faults.append(f"{' and '.join(modes)}: only one of them can be given")
    if faults:
        refuse(ConfigError(faults))
    return arguments


def score_text(name: str, value: float, chance: dict[str, float]) -> str:
    """Returns `67.31% (chance 0.10%)`, or a number that is no share, such as a loss, as it is."""
    form = ".2%" if name in chance and not name.endswith("/loss") else ".4f"
    return f"{value:{form}}" + (f" (chance {chance[name]:{form}})" if name in chance else "")


def refuse(error: ConfigError) -> NoReturn:
    """Prints the fault, or the faults as a list, and exits with 2."""
    several = len(error.faults) > 1
    text = f"{len(error.faults)} faults:\n{error}" if several else f"error: {error.faults[0]}"
    print(text, file=sys.stderr)
    sys.exit(2)


def swept_runs(
    task: Callable[[Any], Any], runs: list[compose.ComposedRun], *, is_here: bool
) -> list[SweptRun]:
    """The runs of a sweep, numbered from 1."""
    differing = set().union(*compose.differing_values([run.overrides for run in runs]))
    swept = []
    for number, run in enumerate(runs, 1):
        texts = tuple(map(_without_secrets, run.overrides))
        own = shlex.join(text for text in texts if text.partition("=")[0] in differing)
        swept.append(SweptRun(task, run.config, number, Sweep(texts, own, is_here)))
    return swept


def _without_secrets(override: str) -> str:
    """An override whose URLs name no secret, with the quotes in which Hydra reads its value."""
    name, equals, value = override.partition("=")
    bare = value.strip(QUOTES)
    return f"{name}{equals}{value.replace(bare, without_secrets(bare))}" if bare else override


def _run_each(runs: list[SweptRun], launcher: dict) -> None:
    """Runs a sweep, here or as jobs; prints each failure and exits with 1 if there is one."""
    jobs = _submit(runs, launcher) if launcher else runs
    failed = False
    for run, job in zip(runs, jobs, strict=True):
        try:
            job.results() if launcher else job()
        except Exception as error:
            failed = True
            is_expected = isinstance(error, ConfigError | RunError)
            text = str(error) if is_expected else traceback.format_exc().rstrip()
            print(f"run {run.number} failed: {text}", file=sys.stderr, flush=True)
    if failed:
        sys.exit(1)


def _submit(runs: list[SweptRun], launcher: dict) -> list:
    """Submits the runs as an array of submitit's jobs and returns these."""
    import submitit

    cluster, folder = launcher.pop("cluster"), launcher.pop("submitit_folder")
    timeouts = {f"{cluster}_max_num_timeout": launcher.pop("max_num_timeout", None)}
    executor = submitit.AutoExecutor(
        folder, cluster=cluster, **{key: value for key, value in timeouts.items() if value}
    )
    executor.update_parameters(
        **{key if key in QUEUE else f"{cluster}_{key}": value for key, value in launcher.items()}
    )
    return executor.submit_array(runs)


def _explain(arguments: argparse.Namespace, entry: str, schema: type) -> None:
    """Prints what a flag asks for: the keys, a config, or what completes a word in the shell."""
    if arguments.help:
        usage = (sys.modules["__main__"].__doc__ or "").strip()
        print(f"{usage}\n\nKeys with their defaults:\n\n{compose.explain(entry, schema)}")
        return
    keys = [text.partition("=")[0].lstrip("+") for text in arguments.overrides]
    replaced = [f"{name}=null" for name in MAPS if arguments.cfg == "job" and name in keys]
    arguments.overrides = [*replaced, *arguments.overrides]  # else a file's map would be merged
    version.setbase("1.3")
    compose.register(schema)
    _run_hydra(
        args=arguments,
        args_parser=get_args_parser(),
        task_function=run_command,
        config_path=str(compose.CONF),
        config_name=compose.config_file(entry, schema),
    )
