"""Provenance of a run: what its numbers depend on, compared when the run resumes."""

import ast
import functools
import hashlib
import json
from pathlib import Path

from lowprec.runs.attempts import CheckpointError

ROOT = Path(__file__).parents[2]
CODE = (  # the modules that a step or an evaluation passes through
    *("lowprec/formats.py", "lowprec/evaluate.py"),
    *(f"lowprec/{package}/*.py" for package in ("ops", "nn", "optim", "clip")),
    "lowprec/diagnostics/blocks.py",
    *(f"lowprec/data/{name}.py" for name in ("open", "index", "order", "shards", "sources", "tar")),
    *(f"lowprec/data/{name}.py" for name in ("cache", "loader", "stream", "workers")),
    *(f"lowprec/train/{name}.py" for name in ("build", "loop", "task", "step", "metrics")),
    *(f"lowprec/train/{name}.py" for name in ("state", "checkpoint", "distributed")),
)
MEASURING = {f"lowprec/nn/{name}.py" for name in ("advice", "noise", "timing")}  # no step's code
REMEDIES = {
    "config": "to train with the new config, start another run: name=...",
    "sources": "to train on the new data, start another run: name=...",
    "code": "if the new code computes the same numbers: resume.allow_drift=true",
    "layout": "to resume with a different sample order: resume.allow_reshard=true",
}


@functools.cache
def code_digests() -> dict[str, str]:
    """Returns a short digest, by path, of each source file that a run's numbers depend on."""
    return {
        str(path.relative_to(ROOT)): code_digest(path.read_text())
        for pattern in CODE
        for path in sorted(ROOT.glob(pattern))
        if str(path.relative_to(ROOT)) not in MEASURING
    }


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_digest(source: str) -> str:
    """Returns 12 hexadecimal digits for what Python code does.

    Comments, docstrings and formatting do not count: the digest covers the syntax tree.
    """
    tree = ast.parse(source)
    scopes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, scopes) and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


def changes(before: object, after: object, name: str = "") -> list[str]:
    """Lists `name: old -> new` for each leaf of nested data that differs; "absent" if missing."""
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if before == after else [f"{name}: {before} -> {after}"]
    lines, prefix = [], f"{name}." if name else ""
    for key in dict.fromkeys([*before, *after]):
        values = before.get(key, "absent"), after.get(key, "absent")
        lines += changes(*values, f"{prefix}{key}")
    return lines


def changes_since(run: Path, facts: dict) -> list[str]:
    """Lists what differs from the environment of the run's last attempt; [] if it is unknown."""
    try:
        before = json.loads((run / "environment.json").read_text())
    except (OSError, ValueError):
        return []
    return changes(before, facts) if isinstance(before, dict) else []


def refuse_mismatch(
    checkpoint: Path, before: dict, after: dict, *, allow_code: bool, allow_layout: bool
) -> list[str]:
    """Raises CheckpointError for differences in provenance, unless allowed; returns those allowed.

    `before` and `after` have `config` and `sources`, which must agree, `code`, and for a stream
    `layout` (ranks and workers).
    """
    allowed = {"code": allow_code, "layout": allow_layout}
    mismatch = {key: changes(before.get(key), after.get(key), key) for key in REMEDIES}
    refused = {key: lines for key, lines in mismatch.items() if lines and not allowed.get(key)}
    if refused:
        listed = "\n  ".join(line for lines in refused.values() for line in lines)
        raise CheckpointError(
            f"{checkpoint} cannot be resumed, because these differ:\n  {listed}\n"
            + "; ".join(REMEDIES[key] for key in refused)
        )
    return [line for lines in mismatch.values() for line in lines]
