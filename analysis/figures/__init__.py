"""The figures by slug: a row for each, which says what it shows and how (`analysis/grammar.py`)."""

from analysis.figures import (
    early_warnings,
    features,
    formats,
    headline,
    leads,
    loss_and_rms,
    losses,
    paired_branches,
    recipes,
    replays,
    scores,
    speed,
    spikes,
)

FIGURES = {
    **replays.FIGURES,
    **paired_branches.FIGURES,
    **loss_and_rms.FIGURES,
    **scores.FIGURES,
    **recipes.FIGURES,
    **headline.FIGURES,
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
