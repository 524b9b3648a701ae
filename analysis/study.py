"""What runs a study asks for, read from its file in `conf/experiment/` without Hydra.

A file sweeps over `hydra.sweeper.params`; each line `# And:  the same with KEY=VALUE ...` of its
header is a further command, whose values take the place of the swept ones.
"""

import contextlib
import itertools
import re
from pathlib import Path

import pandas as pd
import yaml

from analysis.load import DEFAULTS, EXPERIMENTS, flatten

CONF = EXPERIMENTS.parent
GROUPS = {  # group: the column of `Runs.runs` that its choice shows in
    "model": "model.name",
    "precision": "precision.label",
    "optimizer": "optimizer.name",
    "intervention": "intervention.name",
    "scaler": "scaler.name",
}
WORDS = {"null": None, "true": True, "false": False}
NAMES = ("model.name", "precision.label", "optimizer.name")  # what every figure names
IN_CAPTION = ("data.name", "data.digest")
LATE = ("accumulate", "compile", "checkpointing", "eval", "distributed")
MOST = 4  # settings named; of one, values


def commands(experiment: str, scale: str) -> list[tuple[str, list[dict]]]:
    """Each command of a study with its cells, as columns of `Runs.runs`; none without a file."""
    path = _file(experiment, scale)
    if path is None:
        return []
    groups, _ = _chosen(path)
    shown = {key: value for key, value in groups.items() if key in GROUPS}
    return [
        (command, [_columns(shown | cell) for cell in cells]) for command, cells in _overrides(path)
    ]


def settings(experiment: str, scale: str) -> pd.DataFrame:
    """A row a cell of a study, its config whole as in `Runs.runs`; no rows without a file."""
    path = _file(experiment, scale)
    if path is None:
        return pd.DataFrame()
    groups, scalars = _chosen(path)
    rows = []
    for _, cells in _overrides(path):
        for cell in cells:
            chosen = groups | {key: value for key, value in cell.items() if key in groups}
            row = dict(DEFAULTS)
            for group, name in chosen.items():
                row |= of_group(group, name)
            row |= scalars | {k: _value(v) for k, v in cell.items() if k not in groups}
            recipe, autocast = row["precision.recipe"], row["precision.autocast"]
            rows.append(row | {"precision.label": autocast if recipe == "high" else recipe})
    return pd.DataFrame(rows)


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


def differing(drawn: pd.DataFrame, planned: pd.DataFrame, labels: pd.Series) -> list[str]:
    """`num_steps 300, the study's 1,000`: the settings in which drawn runs are not as they should.

    drawn: rows of `Runs.runs`; planned: `settings` of their study, without rows if there is none;
    labels: of the lines of the figure. A setting that the study itself varies is free, so is one
    that every label says. Of no study, those are named in which the runs differ.
    """
    from analysis.naming import SETTINGS, written  # late, as it loads matplotlib

    varies = {key for key in planned if planned[key].map(written).nunique() > 1}
    free = {*varies, *IN_CAPTION}
    found = []
    for key in (*NAMES, *sorted(SETTINGS, key=lambda key: key.startswith(LATE))):
        short = _short(key)
        if key in NAMES or key.endswith(".name"):
            group = key.partition(".")[0]
            names = {*drawn.get(key, []), *planned.get(key, [])}
            if len(names) > 1:  # then what their files say differs, too
                free |= {k for name in names for k in of_group(group, str(name))} - {key}
        if key not in drawn or key in free or key.startswith("diagnostics."):
            continue  # what is recorded changes no number that is drawn
        if labels.str.contains(f"{short}=", regex=False).all():
            continue
        theirs = sorted(set(drawn[key].map(written)), key=_order)
        ours = sorted(set(planned[key].map(written))) if key in planned else None
        if (theirs != ours) if ours else (len(theirs) > 1 and key not in NAMES):
            more = f" and {len(theirs) - MOST} more" if len(theirs) > MOST else ""
            text = f"{short} {' and '.join(theirs[:MOST])}{more}"
            found.append(text + (f", the study's {ours[0]}" if ours else ""))
    rest = len(found) - MOST
    others = [f"{rest} more setting{'s differ' if rest > 1 else ' differs'}"] if rest > 0 else []
    return found[:MOST] + others


def of_group(group: str, name: str) -> dict:
    """What a file of a group says, flat: `model.heads` of conf/model/NAME.yaml."""
    path = CONF / group / f"{name}.yaml"
    return _plain(yaml.safe_load(path.read_text()), f"{group}.") if path.exists() else {}


def _file(experiment: str, scale: str) -> Path | None:
    """The file of a study at one scale; that of its bare name is of the paper's."""
    names = (f"{experiment}_{scale}", *([experiment] if scale == "paper" else []))
    paths = (EXPERIMENTS / f"{name}.yaml" for name in names)
    return next((path for path in paths if path.exists()), None)


def _overrides(path: Path) -> list[tuple[str, list[dict[str, str]]]]:
    """Each command of a study with the overrides of each of its cells."""
    text = path.read_text()
    swept = yaml.safe_load(text).get("hydra", {}).get("sweeper", {}).get("params", {})
    swept = {key: str(values).split(",") for key, values in swept.items()}
    found = []
    for more in ["", *re.findall(r"^# And:\s+the same with (.*)$", text, re.MULTILINE)]:
        axes = swept | {k: [v] for k, v in (pair.split("=", 1) for pair in more.split())}
        cells = [dict(zip(axes, cell, strict=True)) for cell in itertools.product(*axes.values())]
        command = f"python -m experiments.train -m experiment={path.stem} {more}".strip()
        found.append((command, cells))
    return found


def _chosen(path: Path) -> tuple[dict[str, str], dict]:
    """What a study chooses of each group and what it sets, flat, with all it is based on.

    Its own is last; first is conf/train.yaml.
    """
    groups, scalars = _read(path)
    first, _ = _read(CONF / "train.yaml")
    return first | groups, scalars


def _read(path: Path) -> tuple[dict[str, str], dict]:
    content = yaml.safe_load(path.read_text())
    groups, scalars = {}, {}
    for entry in content.pop("defaults", []):
        if isinstance(entry, dict):
            for key, value in entry.items():
                groups[key.removeprefix("override ").removeprefix("/")] = str(value)
        elif (path.parent / f"{entry}.yaml").exists():
            more, based = _read(path.parent / f"{entry}.yaml")
            groups, scalars = more | groups, scalars | based
    content.pop("hydra", None)
    groups = {key: name for key, name in groups.items() if (CONF / key / f"{name}.yaml").exists()}
    return groups, scalars | _plain(content)


def _plain(content: dict, prefix: str = "") -> dict:
    """Flat, as `Runs.runs` has it; YAML takes 2e-3 for text."""
    flat = flatten(content or {}, prefix)
    return {k: _value(v) if isinstance(v, str) else v for k, v in flat.items()}


def _columns(cell: dict[str, str]) -> dict:
    return {GROUPS.get(key, key): _value(value) for key, value in cell.items()}


def _value(text: str) -> object:
    if text in WORDS:
        return WORDS[text]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _order(text: str) -> tuple:
    """Sort key of printed values: numbers by size."""
    number = _value(text.replace(",", ""))
    is_number = isinstance(number, int | float)
    return (not is_number, number if is_number else 0, text)


def _short(key: str) -> str:
    """`beta2` of `optimizer.beta2`, `model` of `model.name`."""
    return key.removesuffix(".name").removesuffix(".label").rpartition(".")[2]


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
    shown = {k: v for k, v in shown.items() if len(cells) > 1 or v != "none"}
    return " ".join(
        str(value) if isinstance(value, str) else f"{key.rpartition('.')[2]}={_printed(value)}"
        for key, value in shown.items()
    )


def _printed(value: object) -> str:
    is_word = value is None or isinstance(value, bool)
    return {v: k for k, v in WORDS.items()}[value] if is_word else f"{value:g}"
