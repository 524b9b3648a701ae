"""Figures and tables from run directories; nothing here imports torch."""

import lowprec.startup  # noqa: F401 (first: pandas may be missing)
from analysis.load import NoRunsError, Runs, load_runs

__all__ = ["NoRunsError", "Runs", "load_runs"]
