"""The figures: a module each, or a row of the table of a module that draws several alike."""

import importlib
from pathlib import Path

TABLES = {  # slug: module whose FIGURES holds it
    **{f"spikes_vs_{what}": "spikes_vs" for what in ("size", "batch", "lr")},
    **{f"spike_lead_{what}": "spike_lead" for what in ("size", "batch", "lr")},
}


def slugs() -> list[str]:
    """The figures there are."""
    modules = {path.stem for path in Path(__file__).parent.glob("*.py")} - {"__init__"}
    return sorted((modules - set(TABLES.values())) | set(TABLES))


def load(slug: str):
    """The figure: a module or an object with `query`, `plot`, `draw` and `caption`."""
    module = importlib.import_module(f"analysis.figures.{TABLES.get(slug, slug)}")
    return module.FIGURES[slug] if slug in TABLES else module


def __getattr__(name: str):
    """`from analysis.figures import op_profile` for a row of a table, too."""
    if name not in TABLES:
        raise AttributeError(f"no figure {name!r}")
    return load(name)
