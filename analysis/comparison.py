"""Decides which runs may be compared: those that agree in every setting that changes weights.

A comparison varies one setting and pairs runs by seed. The runs must agree in all other settings of
`KEY`, except those that belong to the varied one (StableAdamW brings its clipping threshold).
Settings that change no weights do not count: names, scale, what is recorded or evaluated, paths.
"""

from collections.abc import Collection

import numpy as np
import pandas as pd

from analysis.run_files import IN_MAPS, OF_RECORDS, flatten
from lowprec.config.schema import LEGAL_SCALERS, Config, PrecisionConfig
from lowprec.nearest import nearest
from lowprec.nn.recipe import PRODUCTS as PRODUCT_NAMES
from lowprec.runs.identity import identity

LEFT_OUT = {  # of the settings in which compared runs must agree
    *("name", "experiment", "scale", "seed", "eval_every", "evaluation", "diagnostics"),
    "optimizer.paged",
}
MEASURED = ("data.digest", "init.digest", "gpu")  # what the run read and ran on, as it recorded
ADDED = (  # in no digest unless set; a dot ends the name of a group
    "optimizer.zclip",
    "optimizer.skip_sigmas",
    "optimizer.optim_bits",
    "optimizer.on_warning.",
    "precision_change.",
)
KEY = (
    *(k for k in flatten(identity(Config())) if not {k, k.partition(".")[0]} & LEFT_OUT),
    *(key for key in OF_RECORDS if key.startswith(ADDED)),
    *("deterministic", *MEASURED),
)
OF_STREAM = ("save_every", "num_workers")  # change the order of the data under data=stream
PRODUCTS = "precision.products"  # of recipe=custom; its formats are columns below it
CLIPPING = (
    *("optimizer.clip_norm", "optimizer.clip_threshold", "optimizer.clip_weight_decay"),
    *ADDED,
)
NO_SIZES = ("model.name", "model.patch_dropout")
MODEL = tuple(key for key in KEY if key.startswith("model.") and key not in NO_SIZES)
BELONGS = {  # varied setting: those that change with it
    "model.name": MODEL,
    "precision.label": ("precision.recipe", PRODUCTS, "precision.outlier_threshold"),
    "optimizer.name": (*CLIPPING, *("optimizer.min_8bit_size", "optimizer.override_32bit")),
    "optimizer.on_warning.action": tuple(key for key in KEY if "on_warning." in key),
}
OF_AUTOCAST = ("precision.autocast", "scaler.name", "scaler.init_scale", "scaler.max_skips")


def columns(heads: pd.DataFrame) -> list[str]:
    """The columns of `Runs.runs` in which compared runs must agree, besides the seed."""
    keys = [key for key in KEY if key in heads]
    keys += [key for key in heads if key.startswith(IN_MAPS)]
    if "data.name" in heads and (heads["data.name"] == "stream").any():
        keys += [key for key in OF_STREAM if key in heads]
    return keys


def column_of(key: str, names: Collection[str]) -> str | None:
    """The one of some columns that a key names: `optimizer` stands for `optimizer.name`."""
    return next((n for n in (key, f"{key}.name", f"{key}.label") if n in names), None)


def nearest_key(key: str, names: Collection[str]) -> str:
    """`; nearest: x`, as `lowprec.nearest`; x may be the name of a config group."""
    return nearest(key, [*names, *(short(n) for n in names if n.endswith((".name", ".label")))])


def belongs(heads: pd.DataFrame, varied: str) -> list[str]:
    """The columns that change with the varied one, which is among them."""
    keys = {varied, *BELONGS.get(varied, ())}
    if varied == "precision.label" and set(heads[varied]) <= set(LEGAL_SCALERS):
        keys |= set(OF_AUTOCAST)  # only 16-bit formats and fp32 are compared
    if PRODUCTS in keys:
        keys |= {key for key in heads if key.startswith(f"{PRODUCTS}.")}
    return [varied, *(key for key in columns(heads) if key in keys - {varied})]


def signature(heads: pd.DataFrame, *varied: str, seed: bool = True) -> pd.Series:
    """A text for each run, equal for runs that agree in all settings but the varied ones."""
    free = {key for name in varied for key in belongs(heads, name)}
    keys = [key for key in columns(heads) if key not in free] + ["seed"] * seed
    rows = zip(*(map(written, heads[key]) for key in keys), strict=True)
    return pd.Series(["|".join(row) for row in rows], index=heads.index, dtype=object)


def narrow_products(heads: pd.DataFrame) -> pd.Series:
    """`grad_weight int8` for runs of recipe=custom, by the products that have a format; else ""."""
    texts = pd.Series("", heads.index, dtype=object)
    for product in PRODUCT_NAMES:
        formats = heads.get(f"{PRODUCTS}.{product}.format", pd.Series(None, heads.index, object))
        texts += [f" + {product} {name}" if isinstance(name, str) else "" for name in formats]
    return texts.str.removeprefix(" + ").where(heads["precision.recipe"] == "custom", "")


def precision_after(head: dict) -> PrecisionConfig:
    """The precision of a row of `Runs.runs` after its `precision_change`."""
    names = ("autocast", "recipe")
    changes = {name: head[f"precision_change.{name}"] for name in names}
    return PrecisionConfig(
        *(x if isinstance(x, str) else head[f"precision.{name}"] for name, x in changes.items())
    )


def with_baselines(heads: pd.DataFrame, experiment: str, *varied: str) -> pd.DataFrame:
    """The runs of a study, and those of others that differ from one in `varied` and seed alone."""
    own, settings = heads["experiment"] == experiment, signature(heads, *varied, seed=False)
    return heads[own | settings.isin(settings[own])] if own.any() else heads


def one_variant(heads: pd.DataFrame, varied: str) -> pd.DataFrame:
    """For each value of the varied setting, the runs with that value's most frequent settings.

    Two clipping thresholds are two methods: runs with the rarer one do not count.
    """
    if heads.empty:
        return heads
    own = heads[belongs(heads, varied)].map(written).agg("|".join, axis=1)
    usual = own.groupby(heads[varied]).agg(lambda texts: texts.value_counts().idxmax())
    return heads[own == heads[varied].map(usual)]


def matched(heads: pd.DataFrame, varied: str, values: Collection) -> pd.DataFrame:
    """The runs with these values of the varied setting whose other settings all values share."""
    part = one_variant(heads[heads[varied].isin(list(values))], varied)
    num_values = part[varied].groupby(signature(part, varied)).transform("nunique")
    return part[num_values == len(values)]


def comparable(heads: pd.DataFrame, varied: str) -> pd.DataFrame:
    """The runs of the settings that were run with the most values of the varied one.

    Settings with one seed are left out if others have two.
    """
    heads = one_variant(heads, varied)
    values = heads[varied].groupby(signature(heads, varied)).agg(frozenset).to_list()
    most = max(values, key=lambda group: (len(group), values.count(group)), default=frozenset())
    heads = matched(heads, varied, most)
    seeds = heads["seed"].groupby(signature(heads, seed=False)).transform("nunique")
    return heads[seeds > 1] if (seeds > 1).any() else heads


def distinct(heads: pd.DataFrame) -> pd.DataFrame:
    """One row for runs that agree in the whole key and the seed, as when studies share a run."""
    return heads[~signature(heads).duplicated()]


def written(value: object) -> str:
    """A setting as text: `1,000`, `0.002`, `true`, `null`; equal settings have equal texts."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    if value is None or value != value:
        return "null"
    if isinstance(value, int | float | np.number):
        return f"{int(value):,}" if float(value).is_integer() else f"{value:.12g}"
    return str(value)


def counted(num: int, noun: str) -> str:
    """`1 seed`, `1,000 steps`."""
    return f"{num:,} {noun}{'' if num == 1 else 's'}"


def short(key: str) -> str:
    """`beta2` for `optimizer.beta2`, `intervention` for `intervention.name`."""
    if key.startswith("precision_change."):
        return key
    if key.startswith((*IN_MAPS, "optimizer.on_warning.")):
        return key.partition(".")[2]
    for ending in (".name", ".label", ".digest"):
        key = key.removesuffix(ending)
    return key.rpartition(".")[2]
