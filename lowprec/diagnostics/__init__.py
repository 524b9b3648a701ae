"""Diagnostics of training; `watch` is loaded on first access, since `spikes` needs no torch."""

import importlib

__all__ = ["watch"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.monitor").watch
