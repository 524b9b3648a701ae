"""The figures: a row for each, which says what it shows and how (`analysis/grammar.py`)."""

from analysis.figures import (
    feature_magnitude,
    feature_size,
    formats,
    gradient_magnitude,
    layer_noise,
    lead_histogram,
    loss_scaler,
    losses,
    point_of_no_return,
    rms_and_loss,
    scores,
    speed,
    spike_heights,
    spike_warnings,
    tensors_before_spikes,
)
from analysis.grammar import ANYTHING, Bespoke

FIGURES = {
    "feature_magnitude": Bespoke.of_module(feature_magnitude, "feature_magnitude"),
    "feature_size": Bespoke.of_module(
        feature_size, *feature_size.STUDIES, same_but=ANYTHING
    ),
    "gradient_magnitude": Bespoke.of_module(gradient_magnitude, "gradient_magnitude"),
    "layer_noise": Bespoke.of_module(layer_noise, "weight_gradient"),
    "lead_histogram": Bespoke.of_module(
        lead_histogram, "stability", "spikes_vs_size", "spikes_vs_lr", "spikes_vs_batch",
        same_but=ANYTHING,
    ),
    "loss_scaler": Bespoke.of_module(loss_scaler, "loss_scaler"),
    "point_of_no_return": Bespoke.of_module(point_of_no_return, "point_of_no_return"),
    "rms_and_loss": Bespoke.of_module(rms_and_loss, "rms_and_loss", "stability"),
    **{
        f"spike_lead_{name}": Bespoke.of_module(rms_and_loss, f"spikes_vs_{name}")
        for name in ("size", "batch", "lr")
    },
    "spike_heights": Bespoke.of_module(spike_heights, "stability"),
    "spike_warnings": Bespoke.of_module(spike_warnings, "stability"),
    "tensors_before_spikes": Bespoke.of_module(tensors_before_spikes, "stability"),
    **scores.FIGURES,
    **formats.FIGURES,
    **losses.FIGURES,
    **speed.FIGURES,
}  # fmt: skip


def slugs() -> list[str]:
    """The names of all figures."""
    return sorted(FIGURES)


def load(slug: str):
    """A figure, with `query`, `draw` and `caption`."""
    return FIGURES[slug]


def __getattr__(name: str):
    """Supports `from analysis.figures import op_profile` for rows of a table."""
    if name not in FIGURES:
        raise AttributeError(f"no figure {name!r}")
    return FIGURES[name]
