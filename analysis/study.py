"""What runs a study asks for, read from its file in `conf/experiment/` without Hydra.

A file sweeps over `hydra.sweeper.params`; each line `# And:  the same with KEY=VALUE ...` of its
header is a further command, whose values take the place of the swept ones.
"""

import itertools
import re
from pathlib import Path

import pandas as pd
import yaml

from analysis.load import EXPERIMENTS

GROUPS = {  # group: the column of `Runs.runs` that its choice shows in
    "model": "model.name",
    "precision": "precision.label",
    "optimizer": "optimizer.name",
    "intervention": "intervention.name",
    "scaler": "scaler.name",
}
WORDS = {"null": None, "true": True, "false": False}


def commands(experiment: str, scale: str) -> list[tuple[str, list[dict]]]:
    """Each command of a study with its cells, as columns of `Runs.runs`; none without a file."""
    for name in (f"{experiment}_{scale}", experiment):
        path = EXPERIMENTS / f"{name}.yaml"
        if path.exists() and (name != experiment or scale == "paper"):
            break
    else:
        return []
    text = path.read_text()
    content = yaml.safe_load(text)
    fixed = _chosen(path)
    swept = content.get("hydra", {}).get("sweeper", {}).get("params", {})
    swept = {key: str(values).split(",") for key, values in swept.items()}
    found = []
    for more in ["", *re.findall(r"^# And:\s+the same with (.*)$", text, re.MULTILINE)]:
        given = dict(pair.split("=", 1) for pair in more.split())
        axes = {**{k: [v] for k, v in (fixed | given).items()}, **swept}
        axes |= {key: [value] for key, value in given.items()}
        command = f"python -m experiments.train -m experiment={name}"
        found.append((f"{command} {more}".strip(), _cells(axes)))
    return found


def missing(experiment: str, scale: str, runs: pd.DataFrame) -> tuple[int, dict[str, list[str]]]:
    """How many runs a study asks for, and by command those that are not in `Runs.runs`.

    A run counts for a cell when it has its values; seeds and other keys are free where the study
    says nothing of them.
    """
    total, absent = 0, {}
    for command, cells in commands(experiment, scale):
        total += len(cells)
        names = [_name(cell, cells) for cell in cells if not _is_there(cell, runs)]
        if names:
            absent[command] = names
    return total, absent


def _chosen(path: Path) -> dict[str, str]:
    """The groups that a file and those that it is based on choose, the file's own last."""
    chosen = {}
    for entry in yaml.safe_load(path.read_text()).get("defaults", []):
        if isinstance(entry, dict):
            for key, value in entry.items():
                chosen[key.removeprefix("override /")] = str(value)
        elif entry != "_self_":
            chosen = _chosen(path.parent / f"{entry}.yaml") | chosen
    return {key: value for key, value in chosen.items() if key in GROUPS}


def _cells(axes: dict[str, list[str]]) -> list[dict]:
    columns = [GROUPS.get(key, key) for key in axes]
    return [
        dict(zip(columns, map(_value, values), strict=True))
        for values in itertools.product(*axes.values())
    ]


def _value(text: str) -> object:
    if text in WORDS:
        return WORDS[text]
    try:
        return float(text)
    except ValueError:
        return text


def _is_there(cell: dict, runs: pd.DataFrame) -> bool:
    fits = pd.Series(True, index=runs.index)
    for column, value in cell.items():
        if column in runs:
            there = runs[column]
            fits &= there.isna() if value is None else there == value
    return bool(fits.any())


def _name(cell: dict, cells: list[dict]) -> str:
    """A cell by the values in which the cells of its command differ; of one cell, by all."""
    shown = {k: v for k, v in cell.items() if len(cells) == 1 or any(c[k] != v for c in cells)}
    return " ".join(
        str(value) if isinstance(value, str) else f"{key.rpartition('.')[2]}={_printed(value)}"
        for key, value in shown.items()
    )


def _printed(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else {v: k for k, v in WORDS.items()}[value]
