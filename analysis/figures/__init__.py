"""The figures: one module each, or rows of `FIGURES` in a module that draws several alike."""

import functools
import importlib
from pathlib import Path


@functools.cache
def _figures() -> dict:
    figures = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        module = importlib.import_module(f"analysis.figures.{path.stem}")
        figures |= getattr(module, "FIGURES", {path.stem: module})
    return figures


def slugs() -> list[str]:
    """The names of all figures."""
    return sorted(_figures())


def load(slug: str):
    """A figure: a module or an object with `query`, `plot`, `draw` and `caption`."""
    return _figures()[slug]


def __getattr__(name: str):
    """Supports `from analysis.figures import op_profile` for rows of a table."""
    if name.startswith("_") or name not in _figures():
        raise AttributeError(f"no figure {name!r}")
    return load(name)
