"""Figures and tables from run directories; nothing here imports torch."""

from analysis.load import NoRunsError, Runs, load_runs

__all__ = ["NoRunsError", "Runs", "load_runs"]
