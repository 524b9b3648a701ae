"""The cells of a sweep's command line: checked, each with its run directory, all faults named."""

import itertools
from collections.abc import Callable
from functools import partial

from hydra.core.config_store import ConfigStore

from lowprec.config import compose as cli
from lowprec.config.check import ConfigError, check
from lowprec.config.preflight import preflight, process_faults
from lowprec.config.schema import Config
from lowprec.data.open import open_data
from lowprec.data.urls import without_secrets
from lowprec.runs.identity import digest, directory, label, to_dict
from lowprec.sweep.manifest import Cell
from lowprec.train.sources import sources_of

URLS = ("data.train", "+data.train", "++data.train")  # keys whose value may hold a secret
QUOTES = "'\""


def cells_of(overrides: list[str], processes: int = 1) -> list[Cell]:
    """Every cell of the overrides, checked for so many processes each.

    ConfigError names each fault and its cells.
    """
    ConfigStore.instance().store(name="schema", node=cli.defaults(Config))
    checked = partial(
        cli.check_command,
        entry="train",
        multirun=True,
        preflight=partial(preflight, planned=processes),
    )
    try:
        configs = checked(overrides)
    except ConfigError as error:
        raise _named(error, overrides, checked) from error
    cells = []
    for config, chosen in zip(configs, _product(overrides), strict=True):
        sources = sources_of(config, open_data(config))
        run, shown = str(directory(config, sources)), [_shown(text) for text in chosen]
        cells.append(Cell(-1, label(config), digest(config, sources), run, shown, to_dict(config)))
    return cells


def refuse_processes(cells: list[Cell], processes: int) -> None:
    """ConfigError where written cells do not fit so many processes each."""
    faults = [f for cell in cells for f in process_faults(check(cell.config), processes)]
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))


def _product(overrides: list[str]) -> list[tuple[str, ...]]:
    """The overrides of every cell, in the order of `cli.check_command`."""
    chosen = cli.axes(overrides, Config, [])
    given = {choices[0].partition("=")[0] for choices in chosen}
    swept = cli.sweeper_params(chosen, Config, [])
    chosen += [choices for choices in swept if choices[0].partition("=")[0] not in given]
    return list(itertools.product(*chosen))


def _shown(text: str) -> str:
    """An override without the secrets of a URL."""
    name, _, value = text.partition("=")
    return f"{name}={without_secrets(value.strip(QUOTES))}" if name in URLS else text


def _named(
    error: ConfigError, overrides: list[str], checked: Callable[[list[str]], list]
) -> ConfigError:
    """The same faults, each with the cells it is of, unless it is of all."""
    where: dict[str, list[str]] = {}
    cells = _product(overrides)
    several = [
        place for place, choice in enumerate(zip(*cells, strict=True)) if len(set(choice)) > 1
    ]
    for cell in cells if several else []:
        try:
            checked(list(cell))
        except ConfigError as own:
            for fault in own.faults:
                where.setdefault(fault, []).append(
                    " ".join(_shown(cell[place]) for place in several)
                )
    faults = []
    for fault in error.faults:
        of = where.get(fault, [])
        shown = "; ".join(of[:3]) + f" and {len(of) - 3} more" * (len(of) > 3)
        faults.append(f"{fault} [cell {shown}]" if 0 < len(of) < len(cells) else fault)
    return ConfigError(faults, error.config)
