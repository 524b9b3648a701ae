"""What a run's numbers follow from, and what has changed of it when a run goes on."""

import hashlib
import json
from pathlib import Path

from lowprec.runs.attempts import CheckpointError

ROOT = Path(__file__).parents[2]
SOURCES = ("lowprec/**/*.py", "experiments/build*.py", "lowprec/train/spread.py")
SOURCES += ("lowprec/data/open.py",)


def code_digests() -> dict[str, str]:
    """Short digest of each source file that a run's numbers come from, by its path."""
    return {
        str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for pattern in SOURCES
        for path in sorted(ROOT.glob(pattern))
        if path.parent.name != "sweep"  # which starts runs and is no part of them
    }


def changes(before: object, after: object, name: str = "") -> list[str]:
    """`name: old -> new` of every leaf of nested data that differs, "absent" if there is none."""
    if isinstance(before, dict) and isinstance(after, dict):
        prefix = f"{name}." if name else ""
        return [
            line
            for key in dict.fromkeys([*before, *after])
            for line in changes(
                before.get(key, "absent"), after.get(key, "absent"), f"{prefix}{key}"
            )
        ]
    return [] if before == after else [f"{name}: {before} -> {after}"]


def changes_since(run: Path, facts: dict) -> list[str]:
    """What is not as it was when the run's attempt before began; nothing if that is not known."""
    try:
        before = json.loads((run / "environment.json").read_text())
    except (OSError, ValueError):
        return []
    return changes(before, facts) if isinstance(before, dict) else []


def refuse_drift(
    checkpoint: Path, before: dict, after: dict, *, allow_code: bool, allow_layout: bool
) -> list[str]:
    """CheckpointError with each field that differs, unless allowed; returns the allowed ones.

    before, after: maps with `config` and `sources` (never allowed to differ), `code` and `layout`
    (ranks and workers, of a stream).
    """
    allowed = {"code": allow_code, "layout": allow_layout}
    drift = {
        key: changes(before.get(key), after.get(key), key)
        for key in ("config", "sources", "code", "layout")
    }
    refused = [line for key, lines in drift.items() if not allowed.get(key) for line in lines]
    if refused:
        ways_out = [
            way_out
            for key, way_out in (
                ("config", "for another config start another run, with another name=..."),
                ("sources", "for other data start another run, with another name=..."),
                ("code", "if the new code computes the same: resume.allow_drift=true"),
                ("layout", "to go on with another order of samples: resume.allow_reshard=true"),
            )
            if drift[key]
        ]
        listed = "\n  ".join(refused)
        raise CheckpointError(
            f"{checkpoint} was not written by this run as it is now:\n  {listed}\n"
            + "; ".join(ways_out)
        )
    return [line for lines in drift.values() for line in lines]
