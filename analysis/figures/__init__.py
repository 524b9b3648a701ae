"""The figures by slug: a row for each, which says what it shows and how (`analysis/grammar.py`)."""

from analysis.figures import (
    early_warnings,
    features,
    formats,
    leads,
    losses,
    point_of_no_return,
    rms_and_loss,
    scores,
    speed,
    spikes,
)
from analysis.grammar import Bespoke

FIGURES = {
    "point_of_no_return": Bespoke.of_module(point_of_no_return, "point_of_no_return"),
    "rms_and_loss": Bespoke.of_module(rms_and_loss, "rms_and_loss", "stability"),
    **{
        f"spike_lead_{name}": Bespoke.of_module(rms_and_loss, f"spikes_vs_{name}")
        for name in ("size", "batch", "lr")
    },
    **scores.FIGURES,
    **formats.FIGURES,
    **losses.FIGURES,
    **speed.FIGURES,
    **features.FIGURES,
    **spikes.FIGURES,
    **leads.FIGURES,
    **early_warnings.FIGURES,
}


def __getattr__(name: str):
    """Supports `from analysis.figures import op_profile` for rows of a table."""
    if name not in FIGURES:
        raise AttributeError(f"no figure {name!r}")
    return FIGURES[name]
