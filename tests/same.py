"""What is the same, to the byte, in a run that was disturbed and one that was not."""

from lowprec.runs.read import read_rows
from lowprec.train.checkpoint import list_checkpoints


def recorded(run, key):
    """The values of a key in a run's metrics, by row."""
    return [row[key] for row in read_rows(run / "metrics.jsonl")]


def saved(run):
    """The newest checkpoint's weights, moments, random state and numbers, by file."""
    files = list_checkpoints(run)[-1].iterdir()
    return {path.name: path.read_bytes() for path in files if path.name != "manifest.json"}


def contents(run):
    """These and the record: metrics, skipped samples, and the tables of statistics."""
    files = [run / "metrics.jsonl", *run.glob("skips.jsonl"), *run.glob("*.parquet")]
    return saved(run) | {path.name: path.read_bytes() for path in files}


def differing(one, other):
    """The names of files that differ, or that only one has."""
    return sorted(name for name in {**one, **other} if one.get(name) != other.get(name))
