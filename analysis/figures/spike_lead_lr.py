"""Loss spikes and RMS spikes by learning rate, and how far apart. Appendix of arXiv:2304.13013.

Runs: `experiment=spikes_vs_lr`, else `update_clipping`, of which those with large beta2.
"""

import pandas as pd

from analysis import spike_lead
from analysis.load import Runs

EXPERIMENT, STAND_IN = "spikes_vs_lr", "update_clipping"
plot, draw, caption = spike_lead.plot, spike_lead.draw, spike_lead.caption
chosen = spike_lead.chosen


def query(runs: Runs) -> pd.DataFrame:
    """Steps and tensors of the runs that recorded RMS_t: exactly what is plotted."""
    return spike_lead.query(runs, "optimizer.lr")
