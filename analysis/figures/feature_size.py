"""E[abs(x_k)] of the last vision block by recipe, relative to the bf16 run with the same seed.

Not in the paper. Runs: `experiment=accuracy_vs_size`, and those of other STUDIES that differ from
one of its bf16 runs in the recipe alone, or in rounding alone.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import comparison, measures, naming, style
from analysis.load import NoRunsError, Runs

STUDIES = ("accuracy_vs_size", "weight_gradient", "one_product", "formats", "rounding")
EXPERIMENT = STUDIES[0]
BF16, ROUNDING = "bf16", "bf16, other rounding"
EARLY = 0.1  # of the steps: the early record
COLUMNS = (*measures.OF_A_RUN, "recipe", "at", "step", "feature_mean", "ratio")
INT8_WEIGHT_GRADIENT = ("LLM.int8()", "int8 weight gradient only")  # recipes in which it is in int8


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """The runs whose settings, but for the recipe, are those of a bf16 run of the study.

    Runs that agree in every setting and the seed, such as those of two studies, count once.
    """
    pairs = _paired(heads.dropna(subset="scale"))
    own_first = heads.sort_values(
        "experiment", key=lambda names: names != EXPERIMENT, kind="stable"
    )
    once = comparison.distinct(own_first[own_first["run"].isin(pairs.index)])
    return heads[heads["run"].isin(once["run"])]


def _paired(heads: pd.DataFrame) -> pd.Series:
    """By run: the study's bf16 run with the same settings and seed."""
    rates = heads["optimizer.lr"].map("{:.6g}".format).astype(float)
    settings = comparison.signature(heads.assign(**{"optimizer.lr": rates}), "precision.label")
    own = (heads["experiment"] == EXPERIMENT) & (heads["precision.label"] == BF16)
    bases = dict(zip(settings[own], heads.loc[own, "run"], strict=True))
    return settings.map(bases).set_axis(heads["run"]).dropna()


def query(runs: Runs) -> pd.DataFrame:
    """One row per run at the last record, and at the last of the first tenth of the steps (`at`).

    `ratio` is `feature_mean` divided by that of the bf16 run with the same seed at the same step;
    an end at another step has no row. NoRunsError if no run has a recipe and a bf16 run.
    """
    chosen = select(runs.runs)
    if ((chosen["precision.label"] == BF16) & (chosen["experiment"] != "rounding")).all():
        text = f"no run agrees in all but its recipe with a bf16 run of experiment={EXPERIMENT}"
        raise NoRunsError(f"{runs.root}: {text}")
    heads = measures.named_heads(runs.where(runs.summaries["run"].isin(chosen["run"])))
    recipes = measures.with_recipe(heads)["recipe"].map(naming.precision)
    heads["recipe"] = recipes.where(heads["experiment"] != "rounding", ROUNDING)
    frame = measures.by_run(runs, heads, COLUMNS, _sizes)
    sizes = frame.set_index(["run", "at", "step"])["feature_mean"]
    bases = zip(frame["run"].map(_paired(chosen)), frame["at"], frame["step"], strict=True)
    of_bases = [sizes.get(base, np.nan) for base in bases]
    frame["ratio"] = frame["feature_mean"] / of_bases
    return frame[frame["ratio"].notna()].reset_index(drop=True)


def _sizes(run: Runs, head: dict) -> pd.DataFrame:
    values = measures.last_block(run, head["vision_layers"])
    early = values[values.index <= EARLY * head["num_steps"]]
    ends = [values.iloc[-1:].to_frame("feature_mean").assign(at="last")]
    ends += [early.iloc[-1:].to_frame("feature_mean").assign(at="early")]
    return pd.concat(ends).reset_index()


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draws one row per recipe and model, the largest mean at the top; open: the early record."""
    frame = frame[frame["recipe"] != naming.precision(BF16)]
    rows = frame.groupby(["model", "recipe"])
    means = frame[frame["at"] == "last"].groupby(["model", "recipe"])["ratio"].mean().sort_values()
    for place, key in enumerate(means.index):
        part = rows.get_group(key)
        color = _color(part.iloc[0])
        for at, shift, face in (("early", -0.18, "white"), ("last", 0.12, color)):
            ratios = part.loc[part["at"] == at, "ratio"]
            ax.plot(ratios, [place + shift] * len(ratios), "o", ms=3, mfc=face, mec=color, mew=0.7)
    ax.axvline(1, color=style.OTHER, lw=0.8, zorder=0)
    ax.set_xscale("log")
    ends = ax.get_xlim()
    ticks = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2, 2.5, 3, 4, 6, 10, 20, 50, 100)
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlim(ends)
    several = frame["model"].nunique() > 1
    names = [name + (f", {naming.model(model)}" if several else "") for model, name in means.index]
    ax.set_yticks(range(len(means)), names)
    ax.set_xlabel(r"$\mathrm{E}[|x|]$ of the last vision block, relative to bf16")
    ax.grid(visible=False, axis="y")
    return ax


def _color(head: pd.Series) -> tuple | str:
    if head["recipe"].startswith(INT8_WEIGHT_GRADIENT):
        return naming.PRECISIONS["llm_int8"][1]
    return style.OTHER if head["recipe"] == ROUNDING else "black"


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws one panel above its legend."""
    rows = frame.drop_duplicates(["model", "recipe"])
    figure.set_size_inches(1.7 * style.COLUMN_WIDTH, 0.9 + 0.17 * len(rows))
    plot(frame, figure.subplots())
    looks = {
        "int8 weight gradient": {"color": naming.PRECISIONS["llm_int8"][1]},
        "other recipes": {"color": "black"},
        ROUNDING: {"color": style.OTHER},
        f"first {EARLY:.0%} of the steps": {"color": "black", "mfc": "white"},
    }
    handles = [Line2D([], [], ls="", marker="o", ms=3, **look) for look in looks.values()]
    figure.legend(handles, looks, loc="outside lower center", ncols=len(looks))


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and the steps."""
    last, early = (
        sorted(frame.loc[frame["at"] == at, "step"].unique()) for at in ("last", "early")
    )
    also = f" and {naming.join(early)} (open)" if early else ""
    text = (
        "E[abs(x)] of the output of the last block of the vision tower of "
        f"{measures.of_runs(frame)}, divided by that of the bf16 run with the same seed, at step "
        f"{naming.join(last)} (filled){also}."
    )
    return text + measures.caption_end(frame, crosses=False)
