"""The dtype that a run computes in: autocast or 16-bit parameters."""

import contextlib

import torch
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(name: str, device: torch.device) -> contextlib.AbstractContextManager:
    """torch.autocast for "bf16" and "fp16"; nothing for "fp32" and the pure ones."""
    if name in DTYPES:
        return torch.autocast(device.type, dtype=DTYPES[name])
    return contextlib.nullcontext()


def set_parameter_dtype(model: nn.Module, name: str) -> None:
    """Makes the parameters of "pure_bf16" and "pure_fp16" 16-bit, in place.

    The logit scale stays float32: at 16 bits its updates are smaller than half a step.
    """
    dtype = DTYPES.get(name.removeprefix("pure_")) if name.startswith("pure_") else None
    if dtype is not None:
        logit_scale = model.logit_scale.data.clone()
        model.to(dtype)
        model.logit_scale.data = logit_scale
