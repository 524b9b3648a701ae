"""The cells of a sweep's command line: checked, each with its run directory, all faults named."""

from functools import partial

from lowprec.config.check import ConfigError, check
from lowprec.config.compose import compose_command
from lowprec.config.patterns import without_secrets
from lowprec.config.preflight import preflight, process_faults
from lowprec.data.open import open_data
from lowprec.runs.identity import digest, directory, label, to_dict
from lowprec.sweep.manifest import Cell
from lowprec.train.sources import sources_of

URLS = ("data.train", "+data.train", "++data.train")  # keys whose value may hold a secret
QUOTES = "'\""


def cells_of(overrides: list[str], processes: int = 1) -> list[Cell]:
    """Every cell of the overrides, checked for so many processes each.

    ConfigError names each fault and its cells.
    """
    cells = []
    for run in compose_command(
        overrides, multirun=True, preflight=partial(preflight, planned=processes)
    ):
        config, sources = run.config, sources_of(run.config, open_data(run.config))
        path, shown = str(directory(config, sources)), [_shown(text) for text in run.overrides]
        cells.append(Cell(-1, label(config), digest(config, sources), path, shown, to_dict(config)))
    return cells


def refuse_processes(cells: list[Cell], processes: int) -> None:
    """ConfigError where written cells do not fit so many processes each."""
    faults = [f for cell in cells for f in process_faults(check(cell.config), processes)]
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))


def _shown(text: str) -> str:
    """An override without the secrets of a URL."""
    name, _, value = text.partition("=")
    return f"{name}={without_secrets(value.strip(QUOTES))}" if name in URLS else text
