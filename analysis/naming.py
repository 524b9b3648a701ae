"""How the runs of a figure are told apart: by method, by what else differs, by how they ended."""

import numpy as np
import pandas as pd

from analysis import style
from analysis.load import flatten
from lowprec.config.schema import Config
from lowprec.runs.identity import identity

NAMED = (  # keys that the figure names already, or that only name a folder
    *("name", "experiment", "scale", "seed", "model.name", "optimizer.name"),
    *("precision.recipe", "precision.autocast"),
)
SETTINGS = (*(key for key in flatten(identity(Config())) if key not in NAMED), "data.digest")


def name_methods(heads: pd.DataFrame) -> pd.DataFrame:
    """Adds `method` and `variant` to rows of `Runs.runs`.

    Runs of one method are told apart by every setting of identity that differs, and by their data;
    those of one seed that still look the same, by their digest. `variant` counts them.
    """
    pairs = zip(heads["precision.label"], heads["optimizer.name"], strict=True)
    heads = heads.assign(method=[style.method(*pair) for pair in pairs], variant=0)
    for _, group in heads.groupby(["model.name", "method"]):
        written = {key: group[key].map(_written) for key in SETTINGS if key in group}
        differ = [key for key, column in written.items() if column[column != ""].nunique() > 1]
        settings = pd.Series("", index=group.index)
        for key in differ:
            settings += f", {_short(key)}=" + written[key].replace("", "unknown")
        settings = _tell_cells_apart(settings.str.removeprefix(", "), group)
        if settings.any():
            order = {setting: i for i, setting in enumerate(sorted(set(settings)))}
            heads.loc[group.index, "method"] += " (" + settings + ")"
            heads.loc[group.index, "variant"] = settings.map(order)
    return heads


def label(head: dict) -> str:
    """The method, and how the run ended or what it lacks, where it is not finished and whole.

    `recorded`: steps that have a row; `reached`: the last of them.
    """
    method, recorded, reached = head["method"], head["recorded"], head["reached"]
    if head["state"] == "diverged":
        missing = reached - recorded
        lacks = f"; {missing:,} steps missing" if missing else ""
        return f"{method} (diverged at step {reached:,}{lacks})"
    if head["state"] != "finished" or recorded < head["num_steps"]:
        return f"{method} (incomplete: {recorded:,} of {head['num_steps']:,} steps)"
    return method


def with_setting(heads: pd.DataFrame, settings: list[str]) -> list[str]:
    """Labels that begin with what a figure is about; a method that all runs share is left out."""
    methods = [style.method(h.precision, h.optimizer) for h in heads.itertuples()]
    if len(set(methods)) > 1:
        return [f"{text}, {label}" for text, label in zip(settings, heads["label"], strict=True)]
    rest = heads["label"].str.removeprefix(methods[0])
    return [text + end for text, end in zip(settings, rest, strict=True)]


def by_intervention(heads: pd.DataFrame) -> pd.DataFrame:
    """Heads of each model in the order of the style's interventions, which labels begin with."""
    if heads.empty:
        return heads
    names = [style.INTERVENTIONS.get(name, (name,))[0] for name in heads["intervention"]]
    heads = heads.assign(label=with_setting(heads, names))
    rank = {name: i for i, name in enumerate(style.INTERVENTIONS)}
    order = heads["intervention"].map(rank).fillna(len(rank)).sort_values(kind="stable").index
    models = {name: i for i, name in enumerate(heads["model"].unique())}
    return heads.loc[order].sort_values("model", key=lambda m: m.map(models), kind="stable")


def _tell_cells_apart(settings: pd.Series, group: pd.DataFrame) -> pd.Series:
    """Adds its digest to each run of a cell (one setting, one seed) that has several runs."""
    cell = [settings, group["seed"]]
    several = settings.groupby(cell).transform("size") > 1
    twice = group.groupby([*cell, group["digest"]]).cumcount()  # copies of one run
    names = "run " + group["digest"] + twice.map(lambda n: f", copy {n}" if n else "")
    return settings.where(~several, (settings + ", " + names).str.removeprefix(", "))


def _short(key: str) -> str:
    """`beta2` of `optimizer.beta2`, but `intervention` of `intervention.name`."""
    return {"data.digest": "data"}.get(key, key.removesuffix(".name").rpartition(".")[2])


def _written(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return "null" if value is None or value != value else str(value)


def written(value: object) -> str:
    """A setting in a sentence: `1,000`, `0.002`, `true`, `null`; equal ones are written equally."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, int | float | np.number) and value == value:
        return f"{int(value):,}" if float(value).is_integer() else f"{value:g}"
    return _written(value)
