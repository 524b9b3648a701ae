"""The nearest valid name or run, for messages about a name that is wrong."""

import contextlib
import difflib
import fnmatch
import os
from collections.abc import Iterable
from pathlib import Path

MOST = 16  # names that a message lists
MEANT = {  # by names that are no choices
    "gpu": ("cuda",),
    "int8": ("switchback", "llm_int8"),
    "recall": ("retrieval/image_to_text_r1", "retrieval/text_to_image_r1"),
    "accuracy": ("zero_shot/top1",),
}


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`; nearest: x` for the most similar of the allowed names, or nothing.

    A dotted key is also compared by its last part, which may abbreviate the name: `lr` and
    `learning_rate` find `optimizer.lr`. A name in MEANT stands for all of its choices.
    """
    names = [str(choice) for choice in allowed]
    if meant := [choice for choice in MEANT.get(name, ()) if choice in names]:
        return f"; nearest: {', '.join(meant)}"
    by_leaf = {choice.rpartition(".")[2]: choice for choice in reversed(names)}
    leaf = name.rpartition(".")[2]
    initials = "".join(word[:1] for word in leaf.split("_"))
    leaves = difflib.get_close_matches(leaf, by_leaf, n=1, cutoff=0.6)
    matches = (
        ([by_leaf[initials]] if len(initials) > 1 and initials in by_leaf else [])
        or difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        or [by_leaf[leaf] for leaf in leaves]
        or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    )
    return f"; nearest: {matches[0]}" if matches else ""


def some(names: Iterable[str], wrong: str) -> str:
    """`a, b and 12 more, see --help`: up to MOST names, those most similar to a wrong one."""
    names = [str(name) for name in names]
    ratios = {name: difflib.SequenceMatcher(None, wrong, name).ratio() for name in names}
    most = sorted(names, key=ratios.get, reverse=True)[:MOST]
    rest = f" and {len(names) - MOST} more, see --help" if len(names) > MOST else ""
    return ", ".join(name for name in names if name in most) + rest


def nearest_path(path: str | Path) -> str:
    """Returns `; nearest: x` for a similar name in the deepest folder of the path that exists.

    The text says so if no name is similar, and is empty if the path exists. For a pattern of tars
    it names those of a similar folder; for a path under `~`, the path without it.
    """
    path, names = Path(path), []
    if os.path.exists(path):
        return ""
    if path.parts[:1] == ("~",):
        return f"; ~ is not expanded: write {os.path.expanduser(path)}"
    folder = next(parent for parent in path.parents if os.path.isdir(parent))
    with contextlib.suppress(OSError):  # not readable
        names = sorted(os.listdir(folder))
    missing, *rest = path.relative_to(folder).parts
    for name in (missing.partition("*")[0], missing):
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
        if near := fnmatch.filter(names, name) or close:
            match = folder / near[0]
            has_tars = path.suffix == ".tar" and any(match.glob("*.tar"))
            return f"; nearest: {match / '*.tar' if has_tars else match}"
    is_folder = rest and "*" not in missing
    absent = f"; folder {folder.absolute() / missing} does not exist" if is_folder else ""
    return f"{absent}; {folder.absolute()} has no similar name"


def runs_inside(folder: str | Path) -> str:
    """Returns `; it holds x` with up to three of the run directories in a folder, or nothing."""
    runs = sorted(str(file.parent) for file in Path(folder).glob("*/config.yaml"))
    rest = ", ..." if len(runs) > 3 else ""
    return f"; it holds {', '.join(runs[:3])}{rest}" if runs else ""
