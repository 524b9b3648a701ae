"""Loss curves by batch size for several beta2. Figure 7, arXiv:2304.13013.

Runs: `experiment=spikes_vs_batch`.
"""

import pandas as pd

from analysis import beta2_grid
from analysis.load import Runs

plot, draw = beta2_grid.plot, beta2_grid.draw


def query(runs: Runs) -> pd.DataFrame:
    """A row a step of every run: exactly what is plotted."""
    return beta2_grid.query(runs, "batch_size")


def caption(frame: pd.DataFrame) -> str:
    """What is shown, in which method, which runs are incomplete."""
    return beta2_grid.caption(frame, "figure 7")
