"""Mean R@1 of AdamW's runs by their largest attention logit at the end of training.

Not in the paper. Runs: AdamW in 16 bits of `experiment=spikes_vs_size` and of BASELINES.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from analysis import comparison, curves, spike_marks, style
from analysis.load import Runs

EXPERIMENT = "spikes_vs_size"
BASELINES = ("spikes_vs_lr", "spikes_vs_batch", "optimizers", "gradient_magnitude")
BLOCKS = "*resblocks.*"  # of both towers
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
COLUMNS = (*curves.OF_A_RUN, "setting", "step", "logit_max", "recall")


def select(heads: pd.DataFrame) -> pd.DataFrame:
    """AdamW's rows in 16 bits, runs that agree in every setting and the seed once."""
    heads = heads[heads["scale"].notna() & (heads["precision.recipe"] == "high")]
    return comparison.distinct(spike_marks.of_adamw(heads))


def query(runs: Runs) -> pd.DataFrame:
    """One row per run with both values at its last record, or its last step."""
    runs = runs.where(runs.summaries["run"].isin(select(runs.runs)["run"]))
    heads = curves.with_scores(runs, curves.named_heads(runs))
    heads["setting"] = _in_words(heads)
    frame = curves.by_run(runs, heads, COLUMNS, _largest)
    return frame[frame["recall"].notna()].reset_index(drop=True)


def _in_words(heads: pd.DataFrame) -> list[str]:
    """`mini L, lr 0.002, batch 1,024`, and the intervention if there is one."""
    changes = {name: f", {in_print}" for name, (in_print, _) in style.INTERVENTIONS.items()}
    return [
        f"{style.model(head.model)}, lr {head.lr:g}, batch {head.batch_size:,}"
        + changes.get(head.intervention, "").replace(", no change", "")
        for head in heads.itertuples()
    ]


def _largest(run: Runs, head: dict) -> pd.DataFrame:
    try:
        values = run.tensors(BLOCKS, "logit_max").drop(columns="run").set_index("step")
    except LookupError:
        return pd.DataFrame()
    return values.iloc[-1:].max(axis=1).rename("logit_max").reset_index()


def correlations(frame: pd.DataFrame) -> tuple[float, float]:
    """Spearman's correlation with R@1: over all runs, and of ranks within settings."""
    over_runs = stats.spearmanr(frame["logit_max"], frame["recall"]).statistic
    ranks = frame.groupby("setting")[["logit_max", "recall"]].rank()
    ranks -= ranks.groupby(frame["setting"]).transform("mean")
    within = ranks["logit_max"].corr(ranks["recall"]) if (ranks != 0).any(axis=None) else np.nan
    return float(over_runs), float(within)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """Draws one point per run, a color and marker per setting."""
    order = frame.groupby("setting")["logit_max"].median().sort_values().index
    for i, setting in enumerate(order):
        part = frame[frame["setting"] == setting]
        color, marker = style.setting_color(i, max(1, len(order) - 1)), MARKERS[i % len(MARKERS)]
        ax.plot(part["logit_max"], part["recall"], marker, ms=4, color=color, label=setting)
    ax.set_xscale("log")
    ax.set(xlabel="largest attention logit at the end", ylabel="mean R@1 (%)")
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws one panel beside its legend."""
    figure.set_size_inches(2 * style.COLUMN_WIDTH, 2.6)
    plot(frame, figure.subplots())
    figure.legend(loc="outside right center")


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and gives both correlations."""
    over_runs, within = correlations(frame)
    settings = comparison.counted(frame["setting"].nunique(), "setting")
    text = (
        f"Mean R@1 of both directions by the largest attention logit of any block of both towers "
        f"at the last record, of {curves.of_runs(frame)} ({settings}). Spearman's correlation is "
        f"{over_runs:.2f} over all runs, which compares settings"
    )
    text += f", and {within:.2f} within settings." if np.isfinite(within) else "."
    return text + curves.caption_end(frame, crosses=False)
