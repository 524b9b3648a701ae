"""The runs a study asks for, and the mark of a figure whose runs are incomplete or mixed.

`make` writes the mark at the top of the picture and at the end of the caption.
"""

import functools

import pandas as pd

from analysis.comparison import ADDED, PRODUCTS, written
from analysis.load import EXPERIMENTS
from analysis.run_files import NO_TENSORS, flatten
from lowprec.config.compose import compose_command, without_sweep
from lowprec.config.schema import PrecisionConfig
from lowprec.runs.identity import to_dict
from lowprec.runs.read import ENDED

GROUPS = {  # config group: column of `Runs.runs` with the selected file
    "model": "model.name",
    "precision": "precision.label",
    "optimizer": "optimizer.name",
    "intervention": "intervention.name",
    "scaler": "scaler.name",
}


def count_missing(experiment: str, scale: str, runs: pd.DataFrame) -> tuple[int, int]:
    """The number of runs that a study asks for, and how many of them `Runs.runs` lacks.

    A run counts if it has the planned choice for each of GROUPS and the planned value of each key
    that the study sweeps over, of the products and of `comparison.ADDED`; its other settings, such
    as the seed, are free.
    """
    runs_planned = [pd.Series(run).map(written) for run in planned(experiment, scale)]
    made = [
        (runs.reindex(columns=run.index).map(written) == run).all(axis=1) for run in runs_planned
    ]
    return len(runs_planned), sum(not is_it.any() for is_it in made)


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


def levels(experiment: str, scale: str, key: str) -> list:
    """The values of a column of `Runs.runs` that a study's own file names; none without a file.

    These are the values of its sweep, and the one that its runs have without the sweep.
    """
    words = _words(experiment, scale)
    swept = [run[key] for run in planned(experiment, scale) if key in run]
    base = [flatten(to_dict(without_sweep(words)))[key]] if words else []
    return list(dict.fromkeys(swept + base))


def _words(experiment: str, scale: str) -> list[str]:
    """The command line of a study, with settings that it may leave open; none without a file."""
    names = (f"{experiment}_{scale}", *([experiment] if scale == "paper" else []))
    file = next((name for name in names if (EXPERIMENTS / f"{name}.yaml").exists()), None)
    return [f"experiment={file}", "data.train=-", "data.val=-"] if file else []


@functools.cache
def planned(experiment: str, scale: str) -> list[dict]:
    """The settings that identify each run of a study, by column of `Runs.runs`."""
    words, runs = _words(experiment, scale), []
    for run in compose_command(words, multirun=True) if words else []:
        row = flatten(to_dict(run.config))
        precision = PrecisionConfig(row["precision.autocast"], row["precision.recipe"])
        row["precision.label"] = precision.label
        swept = [text.partition("=")[0] for text in run.overrides[len(words) :]]
        keys = [*GROUPS.values(), *(GROUPS.get(key, key) for key in swept)]
        keys += [key for key in row if key.startswith((f"{PRODUCTS}.", *ADDED))]
        runs.append({key: row[key] for key in dict.fromkeys(keys) if key in row})
    return runs
