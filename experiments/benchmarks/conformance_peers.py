"""StableAdamW of other libraries, run on the problem of `conformance_rule`.

A peer that is not installed or does not run here raises; nothing of them is a dependency.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.benchmarks.conformance_rule import BETAS, SHAPES, WEIGHT_DECAY, problem
from lowprec.optim.stable_adamw import StableAdamW

EPS = 1e-6
TOLERANCES = {  # of a distance that is rounding; rules are further apart
    torch.float64: 1e-9,
    torch.float32: 1e-4,
}


@dataclass(frozen=True)
class Peer:
    """`build(parameters)` is the optimizer; `package` names what must be installed."""

    package: str
    build: Callable
    device: str = "cpu"
    dtype: torch.dtype = torch.float64


def _ours(**options: object) -> Callable:
    def build(params: list[Tensor]) -> torch.optim.Optimizer:
        return StableAdamW(params, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, **options)

    return build


def _torch(params: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)


def _optimi(**options: bool) -> Callable:
    def build(params: list[Tensor]) -> torch.optim.Optimizer:
        import optimi

        common = dict(lr=1e-3, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
        return optimi.StableAdamW(params, **common, **options)

    return build


def _pytorch_optimizer(foreach: bool) -> Callable:
    def build(params: list[Tensor]) -> torch.optim.Optimizer:
        import pytorch_optimizer

        common = dict(betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
        return pytorch_optimizer.StableAdamW(params, **common, foreach=foreach)

    return build


def _timm(foreach: bool) -> Callable:
    """Its nearest: it has no StableAdamW, its AdamW can clip."""

    def build(params: list[Tensor]) -> torch.optim.Optimizer:
        import lowprec.clip.torchvision_shim  # noqa: F401 (timm imports torchvision)

        common = dict(betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
        adamw = importlib.import_module("timm.optim").AdamWLegacy
        return adamw(params, **common, foreach=foreach, clipping_threshold=1.0)

    return build


SINGLE = {"dtype": torch.float32}
GPU = {"device": "cuda", **SINGLE}
RAW = _ours(clip_weight_decay=False)
PEERS = {
    "lowprec": Peer("lowprec", _ours(), **SINGLE),
    "lowprec, clip_weight_decay=False": Peer("lowprec", RAW, **SINGLE),
    "lowprec, clip_threshold=None": Peer("lowprec", _ours(clip_threshold=None), **SINGLE),
    "lowprec, on a GPU": Peer("lowprec", _ours(), **GPU),
    "torch AdamW": Peer("torch", _torch),
    "optimi": Peer("torch-optimi", _optimi(foreach=False, triton=False)),
    "optimi, foreach": Peer("torch-optimi", _optimi(foreach=True, triton=False)),
    "optimi, triton": Peer("torch-optimi", _optimi(foreach=False, triton=True), **GPU),
    "pytorch_optimizer": Peer("pytorch_optimizer", _pytorch_optimizer(False)),
    "pytorch_optimizer, foreach": Peer("pytorch_optimizer", _pytorch_optimizer(True)),
    "timm AdamWLegacy, clipping_threshold=1.0": Peer("timm", _timm(False)),
    "timm AdamWLegacy, the same, foreach": Peer("timm", _timm(True)),
}


def run_optimizer(
    build: Callable, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> list[dict]:
    """The trajectory of an optimizer on the problem."""
    params = {
        name: torch.nn.Parameter(_tensor(values, name, device, dtype))
        for name, values in problem().start.items()
    }
    optimizer = build(list(params.values()))
    path = []
    for grads, lr in zip(problem().grads, problem().lrs, strict=True):
        for group in optimizer.param_groups:
            group["lr"] = lr
        for name, p in params.items():
            p.grad = _tensor(grads[name], name, device, dtype)
        optimizer.step()
        path.append({name: p.detach().flatten().tolist() for name, p in params.items()})
    return path


def _tensor(values: list[float], name: str, device: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).reshape(SHAPES[name])
