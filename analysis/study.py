"""The runs a study asks for, and the mark of a figure whose runs are incomplete, mixed or others'.

`make` writes the mark at the top of the picture and at the end of the caption.
"""

import functools
from collections.abc import Sequence

import pandas as pd

from analysis.comparison import KEY, short, written
from analysis.load import EXPERIMENTS, flatten
from lowprec.config.compose import compose_study
from lowprec.config.schema import PrecisionConfig
from lowprec.runs.read import ENDED

GROUPS = {  # config group: column of `Runs.runs` with the selected file
    "model": "model.name",
    "precision": "precision.label",
    "optimizer": "optimizer.name",
    "intervention": "intervention.name",
    "scaler": "scaler.name",
}
SETTINGS = tuple(key for key in KEY if key not in ("deterministic", "data.name"))
MOST = 4  # settings named in a mark


def settings(experiment: str, scale: str) -> pd.DataFrame:
    """The whole config of each run of a study, as in `Runs.runs`; no rows if it has no file."""
    return pd.DataFrame([row for row, _ in _planned(experiment, scale)])


def missing(experiment: str, scale: str, runs: pd.DataFrame) -> tuple[int, list[str]]:
    """The number of runs that a study asks for, and names for those that `Runs.runs` lacks.

    A run counts if it has the planned choice for each of GROUPS and the planned value of each key
    that the study sweeps over; its other settings, such as the seed, are free.
    """
    planned = [{key: row[key] for key in keys} for row, keys in _planned(experiment, scale)]
    swept = [
        key for run in planned[:1] for key in run if len({row.get(key) for row in planned}) > 1
    ]
    names = []
    for run in planned:
        fits = pd.Series(True, index=runs.index)
        for key, value in run.items():
            if key in runs:
                fits &= runs[key].isna() if value is None else runs[key] == value
        if not fits.any():
            values = {key: run[key] for key in swept or run if run[key] != "none"}
            words = [
                v if isinstance(v, str) else f"{short(k)}={written(v)}" for k, v in values.items()
            ]
            names.append(" ".join(dict.fromkeys(words)))
    return len(planned), names


def differing(drawn: pd.DataFrame, experiment: str, scale: str) -> list[str]:
    """The settings of drawn runs that no run of the study has: `num_steps 300, the study's 1,000`.

    Without a file there are no differences: the labels of a figure distinguish its runs.
    """
    planned = settings(experiment, scale)
    texts = []
    for key in SETTINGS:
        if key in drawn and key in planned:
            theirs = sorted(set(planned[key].map(written)))
            others = sorted(set(drawn[key].map(written)) - set(theirs))
            if others:
                texts.append(
                    f"{short(key)} {' and '.join(others)}, the study's {' and '.join(theirs)}"
                )
    rest = len(texts) - MOST
    return texts[:MOST] + ([f"{rest} more settings differ"] if rest > 0 else [])


def mark_of_runs(
    drawn: pd.DataFrame,
    total: int = 0,
    num_missing: int = 0,
    other: str = "",
    lost: int = 0,
    differing: Sequence[str] = (),
) -> str:
    """What is incomplete or mixed in a figure, in words; "" if nothing is.

    Args:
        drawn: the drawn rows of `Runs.runs`.
        total: number of runs that the study asks for.
        num_missing: number of those that do not exist.
        other: the study whose runs stand in for the figure's own.
        lost: number of runs that could not be drawn.
        differing: see `differing`.
    """
    ended = drawn["state"].isin(ENDED)
    rows_missing = drawn["note"].str.contains("are missing", regex=False)
    incomplete = (~ended | rows_missing).sum()
    damaged = (ended & ~rows_missing & (drawn["note"] != "")).sum()
    data = drawn["data.digest"].where(drawn["data.digest"] != "", drawn["data.train"].astype(str))
    texts = {
        f"runs of {other}": other,
        f"{incomplete} of {len(drawn)} runs incomplete": incomplete,
        f"{damaged} of {len(drawn)} runs damaged": damaged,
        f"{lost} of {len(drawn) + lost} runs not drawn": lost,
        f"{num_missing} of the study's {total} runs are missing": num_missing,
        f"{data.nunique()} different data sets": data.nunique() > 1,
    }
    return "; ".join([*(text for text, holds in texts.items() if holds), *differing])


@functools.cache
def _planned(experiment: str, scale: str) -> list[tuple[dict, list[str]]]:
    """For each run of a study: its flat config, and the columns that identify it."""
    names = (f"{experiment}_{scale}", *([experiment] if scale == "paper" else []))
    file = next((name for name in names if (EXPERIMENTS / f"{name}.yaml").exists()), None)
    runs = []
    for overrides, config in compose_study(file) if file else []:
        row = flatten(config)
        precision = PrecisionConfig(row["precision.autocast"], row["precision.recipe"])
        swept = [text.partition("=")[0] for text in overrides[1:]]  # the first is the experiment
        columns = dict.fromkeys([*GROUPS.values(), *(GROUPS.get(key, key) for key in swept)])
        runs.append((row | {"precision.label": precision.label}, list(columns)))
    return runs
