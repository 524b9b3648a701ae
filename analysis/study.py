"""The levels of a setting in a study, and the mark of a figure whose runs are incomplete or mixed.

`make` writes the mark at the top of the picture and at the end of the caption.
"""

import functools

import pandas as pd

from analysis.load import EXPERIMENTS
from analysis.run_files import NO_TENSORS, flatten
from lowprec.config.compose import compose_command, without_sweep
from lowprec.runs.identity import to_dict
from lowprec.runs.read import ENDED


def mark_of_runs(drawn: pd.DataFrame, num_lost: int = 0) -> str:
    """What is incomplete or mixed in a figure, in words; "" if nothing is.

    `drawn`: the drawn rows of `Runs.runs`; `num_lost` runs could not be drawn.
    """
    incomplete = (~drawn["state"].isin(ENDED) | ~drawn["note"].isin(["", NO_TENSORS])).sum()
    data = drawn["data.digest"].where(drawn["data.digest"] != "", drawn["data.train"].astype(str))
    texts = {
        f"{incomplete} of {len(drawn)} runs incomplete or damaged": incomplete,
        f"{num_lost} of {len(drawn) + num_lost} runs not drawn": num_lost,
        f"{data.nunique()} different data sets": data.nunique() > 1,
    }
    return "; ".join(text for text, holds in texts.items() if holds)


@functools.cache
def levels(experiment: str, scale: str, key: str) -> list:
    """The values of a config key in the runs that a study's own file names; none without a file.

    The value that its runs have without the sweep is among them.
    """
    if not (EXPERIMENTS / f"{experiment}_{scale}.yaml").exists():
        return []
    words = [f"experiment={experiment}_{scale}", "data.train=-", "data.val=-"]  # may be left open
    runs = [run.config for run in compose_command(words, multirun=True)]
    values = [flatten(to_dict(config))[key] for config in (*runs, without_sweep(words))]
    return list(dict.fromkeys(values))
