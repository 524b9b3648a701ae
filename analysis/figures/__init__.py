"""The figures by slug: a row for each, which says what it shows and how (`analysis/grammar.py`)."""

import importlib
import pkgutil

FIGURES = {}  # of all modules here, each of which has a table of this name
for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    FIGURES |= importlib.import_module(_module.name).FIGURES


def __getattr__(name: str):
    """Supports `from analysis.figures import op_profile` for rows of a table."""
    if name not in FIGURES:
        raise AttributeError(f"no figure {name!r}")
    return FIGURES[name]
