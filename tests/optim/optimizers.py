"""The same small tensors, gradients and optimizers for all tests of this folder."""

import copy
import io
import pickle

import torch

from lowprec.config.schema import TORCH_OPTIMIZERS
from lowprec.optim.stable_adamw import STATISTICS

RULE = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-6}
SHAPES = {"a.0.weight": (20, 30), "a.bias": (30,), "b.0.weight": (16, 40), "b.scale": ()}
HALF = {"dtype": torch.bfloat16}
OURS = {  # options of StableAdamW, and the parameters' dtype
    "adamw": {"clip_threshold": None},
    "stable_adamw": {},
    "float64": {"dtype": torch.float64},
    "16-bit parameters": HALF,
    "8-bit moments": {"optim_bits": 8, "min_8bit_size": 300},
    "kernels": {"fused": True},
    "kernels, 8-bit moments": {"fused": True, "optim_bits": 8, "min_8bit_size": 300, **HALF},
}
# kernels are interpreted without a GPU, which takes seconds
KINDS = (*(kind for kind in OURS if "kernels" not in kind), *TORCH_OPTIMIZERS)


def make_params(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES.values()]
    return [torch.nn.Parameter(x.to(device, dtype)) for x in values]


def make_groups(dtype=torch.float32, device="cpu", weight_decay=0.1):
    """Two groups of named parameters, of which the first decays."""
    named = list(zip(SHAPES, make_params(dtype, device), strict=True))
    return [
        {"params": named[::2], "weight_decay": weight_decay},
        {"params": named[1::2], "weight_decay": 0.0},
    ]


def params_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_grads(optimizer, step, scale=1.0, without=()):
    """Gradients that depend on the step and jump at step 4; `without`: tensors without one."""
    for i, p in enumerate(params_of(optimizer)):
        generator = torch.Generator().manual_seed(100 * step + i)
        grad = torch.randn(p.shape, generator=generator) * scale * (30.0 if step == 4 else 1.0)
        p.grad = None if i in without else grad.to(p.device, p.dtype)


def take(optimizer, steps, without=()):
    for step in steps:
        set_grads(optimizer, step, without=without)
        optimizer.step()
    return optimizer


def by_file(optimizer, twin):
    """Copies parameters, and the state through a file, into another optimizer."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    for p, own in zip(params_of(twin), params_of(optimizer), strict=True):
        p.data.copy_(own)
    twin.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    return twin


COPIES = {
    "file": by_file,
    "deepcopy": lambda optimizer, twin: copy.deepcopy(optimizer),
    "pickle": lambda optimizer, twin: pickle.loads(pickle.dumps(optimizer)),
}


def row_of(optimizer, i):
    return dict(zip(STATISTICS, optimizer.statistics[i].tolist(), strict=True))


def assert_equal(first, second):
    assert all(map(torch.equal, params_of(first), params_of(second)))


def assert_close(first, second, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(params_of(first), params_of(second), rtol=rtol, atol=atol)


def assert_near(actual, expected, share, **tolerances):
    """Equal but for few elements, whose 8-bit moments were rounded to another side."""
    differ = ~torch.isclose(actual.float(), expected.float(), **tolerances)
    assert differ.sum() <= share * differ.numel(), differ.sum()
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0.2, atol=0.02)
