"""The nearest valid name, for messages about a name that does not exist."""

import difflib
from collections.abc import Iterable


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`; nearest: x` for the most similar of the allowed names, or nothing.

    A dotted key is also compared by its last part, so that `lr` finds `optimizer.lr`.
    """
    names = [str(choice) for choice in allowed]
    by_leaf = {choice.rpartition(".")[2]: choice for choice in reversed(names)}
    leaves = difflib.get_close_matches(name.rpartition(".")[2], by_leaf, n=1, cutoff=0.6)
    matches = (
        difflib.get_close_matches(name, names, n=1, cutoff=0.75)
        or [by_leaf[leaf] for leaf in leaves]
        or difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    )
    return f"; nearest: {matches[0]}" if matches else ""
