"""What runs a study asks for, and the settings in which drawn runs differ from it."""

import functools

import pandas as pd

from analysis.comparison import KEY, short, written
from analysis.load import EXPERIMENTS, command, flatten
from lowprec.config.compose import choice_keys, compose_study
from lowprec.config.schema import PrecisionConfig

GROUPS = {  # group: the column of `Runs.runs` that shows its choice
    "model": "model.name",
    "precision": "precision.label",
    "optimizer": "optimizer.name",
    "intervention": "intervention.name",
    "scaler": "scaler.name",
}
NAMES = ("model.name", "precision.label", "optimizer.name")  # what every figure names
SETTINGS = tuple(key for key in KEY if key not in (*NAMES, "deterministic"))
IN_CAPTION = ("data.name", "data.digest")
LATE = ("accumulate", "compile", "checkpointing", "eval", "distributed")
MOST = 4  # settings that are named, and values of one setting


def settings(experiment: str, scale: str) -> pd.DataFrame:
    """The whole config of each run of a study, as in `Runs.runs`; no rows without a file."""
    return pd.DataFrame([row for row, _ in _planned(experiment, scale)])


def missing(experiment: str, scale: str, runs: pd.DataFrame) -> tuple[int, dict[str, list[str]]]:
    """How many runs a study asks for, and by command the names of those not in `Runs.runs`.

    A run counts for a planned one if it has the same choices of GROUPS and the same values of the
    keys that the study sweeps over; all others, such as the seed, are free.
    """
    planned = [{key: row[key] for key in keys} for row, keys in _planned(experiment, scale)]
    absent = [run for run in planned if not _is_there(run, runs)]
    names = [_name(run, planned) for run in absent]
    return len(planned), {command(experiment, scale): names} if names else {}


def differing(drawn: pd.DataFrame, planned: pd.DataFrame, labels: pd.Series) -> list[str]:
    """The settings in which drawn runs are not as planned: `num_steps 300, the study's 1,000`.

    Settings that the study varies or that every label names are left out. Without a study, those
    in which the runs differ from each other are named.

    Args:
        drawn: rows of `Runs.runs`.
        planned: `settings` of their study, without rows if there is none.
        labels: the labels of the figure's lines.
    """
    free = {key for key in planned if planned[key].map(written).nunique() > 1} | {*IN_CAPTION}
    sentences = []
    for key in (*NAMES, *sorted(SETTINGS, key=lambda key: key.startswith(LATE))):
        if key in NAMES or key.endswith(".name"):
            group = key.partition(".")[0]
            names = {*drawn.get(key, []), *planned.get(key, [])}
            if len(names) > 1:  # the keys that their files set differ with them
                free |= {f"{group}.{k}" for n in names for k in choice_keys(group, str(n))} - {key}
        if key not in drawn or key in free:
            continue
        if labels.str.contains(f"{short(key)}=", regex=False).all():
            continue
        theirs = sorted(set(drawn[key].map(written)), key=_order)
        ours = sorted(set(planned[key].map(written))) if key in planned else None
        if (theirs != ours) if ours else (len(theirs) > 1 and key not in NAMES):
            more = f" and {len(theirs) - MOST} more" if len(theirs) > MOST else ""
            text = f"{short(key)} {' and '.join(theirs[:MOST])}{more}"
            sentences.append(text + (f", the study's {ours[0]}" if ours else ""))
    rest = len(sentences) - MOST
    others = [f"{rest} more setting{'s differ' if rest > 1 else ' differs'}"] if rest > 0 else []
    return sentences[:MOST] + others


@functools.cache
def _planned(experiment: str, scale: str) -> list[tuple[dict, list[str]]]:
    """For each run of a study its config, flat, and the columns that tell whether it is there."""
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


def _order(text: str) -> tuple:
    """Sort key of printed values: numbers by size, before words."""
    try:
        return False, float(text.replace(",", "")), text
    except ValueError:
        return True, 0, text


def _is_there(planned: dict, runs: pd.DataFrame) -> bool:
    """Whether a run has the planned values."""
    fits = pd.Series(True, index=runs.index)
    for column, value in planned.items():
        if column in runs:
            fits &= runs[column].isna() if value is None else runs[column] == value
    return bool(fits.any())


def _name(run: dict, planned: list[dict]) -> str:
    """A run by the values that not all runs of its study share, or the only one by all."""
    words = {}
    for key, value in run.items():
        if value != "none" and (
            len(planned) == 1 or any(other.get(key) != value for other in planned)
        ):
            is_word = isinstance(value, str)
            words[value if is_word else f"{short(key)}={written(value)}"] = None
    return " ".join(words)
