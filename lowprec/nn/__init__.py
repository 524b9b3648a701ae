"""Low-precision layers, loaded on first access: importing `nn.recipe` needs no torch."""

import importlib

_HOMES = {
    "LowPrecisionLinear": "linear",
    "SwitchBackLinear": "linear",
    "advise": "advice",
    "apply_recipe": "replace",
    "prepare_for_training": "replace",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
