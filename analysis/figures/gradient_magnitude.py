"""Gradients of the last product of some blocks over training, with and without layer-scale.

After the appendix of arXiv:2304.13013. Runs: `experiment=gradient_magnitude`.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import measures, naming, panels, paper, style
from analysis.load import Runs

TENSOR = paper.BLOCK + ".mlp.c_proj.weight"
STATISTICS = {"grad_norm": "gradient norm", "grad_abs_max": "largest gradient"}
COLUMNS = (*measures.OF_A_RUN, "statistic", "block", "step", "gradient", "gradient_smoothed")
WIDTH = 2.5  # inches of a panel
BELOW = 0.001  # share of the gradients, the smallest, that the axes leave out


def query(runs: Runs) -> pd.DataFrame:
    """One row per recorded step, block and statistic: exactly what is plotted."""
    heads = measures.named_heads(runs, ("intervention.name",))
    return measures.by_run(runs, measures.by_intervention(heads), COLUMNS, _gradients)


def _gradients(run: Runs, head: dict) -> pd.DataFrame:
    parts = []
    for block in paper.blocks_at_paper_depths(head["vision_layers"]):
        for statistic in STATISTICS:
            values = run.series(TENSOR.format(block), statistic)
            values = values.where(np.isfinite(values) & (values > 0))
            smoothed = style.smooth(values, style.smoothing_width(len(values)))
            part = pd.DataFrame({"gradient": values, "gradient_smoothed": smoothed})
            parts.append(part.reset_index().assign(statistic=statistic, block=block))
    return pd.concat(parts)


def plot(frame: pd.DataFrame, ax: Axes) -> Axes:
    """One panel for the runs of one label and one statistic: lines by block, the first dark."""
    head = frame.iloc[0]
    for (run, block), line in frame.groupby(["run", "block"]):
        color = style.depth_color(block / max(1, head["vision_layers"] - 1))
        label = f"block {block}" if run == frame["run"].min() else None
        ax.plot(line["step"], line["gradient"], color=color, alpha=0.18, lw=0.5, rasterized=True)
        ax.plot(line["step"], line["gradient_smoothed"], color=color, label=label)
    ax.set(yscale="log", xlim=(0, head["num_steps"]))
    panels.step_axis(ax)
    return ax


def draw(frame: pd.DataFrame, figure: Figure) -> None:
    """Draws a column for runs that differ in seed alone, a row for each statistic.

    The columns of a model have one scale.
    """
    columns = [part for _, part in frame.groupby(["model", "label"], sort=False)]
    statistics = [name for name in STATISTICS if name in set(frame["statistic"])]
    figure.set_size_inches(max(style.COLUMN_WIDTH, WIDTH * len(columns)), 2 * len(statistics) + 0.4)
    axes = figure.subplots(len(statistics), len(columns), squeeze=False)
    for column, of_label in enumerate(columns):
        head = of_label.iloc[0]
        model = naming.model(head["model"])
        axes[0, column].set_title(f"{model}\n{head['label']}".replace(" (", "\n("))
        for row, statistic in enumerate(statistics):
            ax, part = axes[row, column], of_label[of_label["statistic"] == statistic]
            same = frame[(frame["model"] == head["model"]) & (frame["statistic"] == statistic)]
            if part.empty:
                ax.set_axis_off()
                continue
            lowest, highest = same["gradient"].quantile([BELOW, 1])
            plot(part, ax).set_ylim(0.8 * lowest, 1.25 * highest)
            ax.set_xlabel("step" if row == len(statistics) - 1 else "")
            ax.set_ylabel(STATISTICS[statistic] if column == 0 else "")
    blocks = [f"block {block}" for block in sorted(frame["block"].unique())]
    panels.legend_below(figure, list(axes.flat), blocks)


def caption(frame: pd.DataFrame) -> str:
    """Describes the runs and names those that did not finish."""
    return (
        "Gradient of mlp.c_proj.weight of blocks of the vision tower of "
        f"{measures.of_runs(frame)}. After the appendix of arXiv:2304.13013, which shows the mean "
        f"in place of the norm. Lines: centered box average over at most {style.SMOOTHING} records "
        "of a run, edges cut; faint: every record. Gradients that are 0 or not finite are gaps, "
        f"and the axes leave out the lowest {BELOW:.1%} of the others. All "
        f"runs: {measures.methods(frame)}.{measures.caption_end(frame, crosses=False)}"
    )
