"""The nearest valid name, for messages about a name that does not exist."""

import difflib
from collections.abc import Iterable


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`; nearest: x` for the most similar of the allowed names, or nothing.

    A dotted key is also compared by its last part, so that `lr` finds `optimizer.lr`.
    """
    names = [str(choice) for choice in allowed]
    by_leaf = {choice.rpartition(".")[2]: choice for choice in reversed(names)}
    leaf = name.rpartition(".")[2]
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    found = found or [by_leaf[n] for n in difflib.get_close_matches(leaf, by_leaf, 1, 0.6)]
    found = found or difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f"; nearest: {found[0]}" if found else ""
