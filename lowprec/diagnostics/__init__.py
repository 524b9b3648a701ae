"""Diagnostics of training; its names are loaded on first access, since `spikes` needs no torch."""

import importlib

__all__ = ["Protocol", "watch"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.monitor"), name)
