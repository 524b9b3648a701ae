"""The cells of a sweep's command line: checked, each with its run directory, all faults named."""

import itertools

from hydra.core.config_store import ConfigStore

from experiments import cli
from experiments.open_data import open_data
from experiments.preflight import preflight
from experiments.train import sources_of
from lowprec.config import Config
from lowprec.run import digest, directory, label, to_dict
from lowprec.sweep.ledger import Cell
from lowprec.validate import ConfigError


def cells_of(overrides: list[str]) -> list[Cell]:
    """Every cell of the overrides, checked; ConfigError names each fault and its cells."""
    ConfigStore.instance().store(name="schema", node=cli.defaults(Config))
    try:
        configs = cli.check_command(overrides, "train", multirun=True, preflight=preflight)
    except ConfigError as error:
        raise _named(error, overrides) from error
    cells = []
    for config, chosen in zip(configs, _product(overrides), strict=True):
        sources = sources_of(config, open_data(config))
        run = str(directory(config, sources))
        cells.append(
            Cell(-1, label(config), digest(config, sources), run, list(chosen), to_dict(config))
        )
    return cells


def _product(overrides: list[str]) -> list[tuple[str, ...]]:
    """The overrides of every cell, in the order of `cli.check_command`."""
    chosen = cli.axes(overrides, Config, [])
    given = {choices[0].partition("=")[0] for choices in chosen}
    swept = cli.sweeper_params(chosen, Config, [])
    chosen += [choices for choices in swept if choices[0].partition("=")[0] not in given]
    return list(itertools.product(*chosen))


def _named(error: ConfigError, overrides: list[str]) -> ConfigError:
    """The same faults, each with the cells it is of, unless it is of all."""
    where: dict[str, list[str]] = {}
    cells = _product(overrides)
    several = [
        place for place, choice in enumerate(zip(*cells, strict=True)) if len(set(choice)) > 1
    ]
    for cell in cells if several else []:
        try:
            cli.check_command(list(cell), "train", multirun=True, preflight=preflight)
        except ConfigError as own:
            for fault in own.faults:
                where.setdefault(fault, []).append(" ".join(cell[place] for place in several))
    faults = []
    for fault in error.faults:
        of = where.get(fault, [])
        shown = "; ".join(of[:3]) + f" and {len(of) - 3} more" * (len(of) > 3)
        faults.append(f"{fault} [cell {shown}]" if 0 < len(of) < len(cells) else fault)
    return ConfigError(faults, error.config)
