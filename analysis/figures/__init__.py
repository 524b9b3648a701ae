"""The figures: one module each, or rows of `FIGURES` in a module that draws several alike."""

import importlib
from pathlib import Path

TABLES = {  # slug: module whose FIGURES holds it
    **dict.fromkeys(("op_profile", "quantize_share"), "speed_by_dim"),
    **dict.fromkeys(("switchback_variants_speed", "switchback_vs_llmint8_speed"), "speed_by_dim"),
    **dict.fromkeys(("beta2_schedule", "fp8_fixes"), "loss_by_setting"),
    **{f"spikes_vs_{key}": "loss_by_setting" for key in ("size", "batch", "lr")},
    **{f"spike_lead_{key}": "spike_lead" for key in ("size", "batch", "lr")},
}


def slugs() -> list[str]:
    """The names of all figures."""
    modules = {path.stem for path in Path(__file__).parent.glob("*.py")} - {"__init__"}
    return sorted((modules - set(TABLES.values())) | set(TABLES))


def load(slug: str):
    """A figure: a module or an object with `query`, `plot`, `draw` and `caption`."""
    module = importlib.import_module(f"analysis.figures.{TABLES.get(slug, slug)}")
    return module.FIGURES[slug] if slug in TABLES else module


def __getattr__(name: str):
    """Supports `from analysis.figures import op_profile` for rows of a table."""
    if name not in TABLES:
        raise AttributeError(f"no figure {name!r}")
    return load(name)
