"""Where a figure comes from: its runs, the code that drew it, digests of files."""

import hashlib
import importlib.metadata
import sys
from pathlib import Path

import pandas as pd

from analysis.load import as_path
from lowprec.runs.environment import commit

PACKAGES = ("lowprec", "matplotlib", "numpy", "pandas", "pyarrow")


def of_runs(drawn: pd.DataFrame, left_out: list[str]) -> dict:
    """The runs, their state and the digest of their metrics."""
    runs = [
        {
            "path": run.path,
            "digest": run.digest,
            "state": run.state,
            "step": int(run.step),
            "num_steps": int(run.num_steps),
            "note": run.note,
            "metrics_sha256": sha256(as_path(run.path) / "metrics.jsonl"),
        }
        for run in drawn.itertuples()
    ]
    return {"runs": runs, "left_out": left_out}


def code() -> dict:
    """Commit and package versions of what drew."""
    versions = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {"commit": commit(digits=40), "versions": versions}


def sha256(path: Path | str) -> str:
    """Digest of a file, by its path or URL."""
    return hashlib.sha256(as_path(path).read_bytes()).hexdigest()
