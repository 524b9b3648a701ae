"""Trains one cell of a sweep from the config that was written down when it was submitted.

    python -m experiments.sweep_cell SWEEP INDEX

A launcher starts this; by hand it repeats what the cell does. Edits of `conf/` since then change
nothing; other data do, and are refused, as they would be another run.
"""

import sys
from pathlib import Path

from experiments import train
from experiments.entry import refuse
from lowprec.config.check import ConfigError, RunError, check
from lowprec.data.open import open_data
from lowprec.runs.identity import directory
from lowprec.sweep.manifest import Ledger
from lowprec.train.sources import sources_of


def main(folder: Path, index: int) -> None:
    """Runs the cell; a run that was asked to stop exits 75, a failure 1, a bad config 2."""
    cell = Ledger(folder).cells[index]
    try:
        config = check(cell.config)
        run = directory(config, sources_of(config, open_data(config)))
        if str(run) != cell.run:
            sys.exit(f"the data of {cell.run} are no longer those of its sweep: now it is {run}")
        train.main(config)
    except ConfigError as error:
        refuse(error)
    except RunError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
