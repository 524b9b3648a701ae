"""Times an optimizer's step over all tensors of a model, beside other libraries' optimizers.

    python -m experiments.benchmarks.optimizer model=vit_h14
    python -m experiments.benchmarks.optimizer model=vit_b32 precision.autocast=pure_bf16

Takes the keys of `train`: the model gives the tensors, `precision.autocast` their dtype. Gradients
are random and constant. Ours record ten statistics of every tensor, the others none, and are timed
only if some tensors move as in plain torch. 8-bit AdamW of a library is timed alone and with the
statistics that a run records. `ratio` compares with torch's fused AdamW; `state_bytes` is the
optimizer's state in bytes per parameter. Each case adds a JSON line to
`runs/bench/optimizer/<time>.jsonl`.
"""

import importlib
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from experiments.benchmarks.report import median_ms, reason_of, reporter
from experiments.entry import run_command
from lowprec.clip.model import build_model
from lowprec.config.schema import Config
from lowprec.optim import StableAdamW
from lowprec.optim.eight_bit import BitsAndBytesAdamW8bit, EightBitAdamW, TorchaoAdamW8bit
from lowprec.train.build import pick_device, set_parameter_dtype

BASE = "torch AdamW fused"
OURS = {  # case: (options, bytes read and written per element of float32 parameters)
    "StableAdamW": ({}, 40),
    "AdamW": ({"clip_threshold": None}, 32),
    "StableAdamW definition": ({"fused": False}, None),
}
REPEATS = 20
CHECKED = 24  # tensors that are compared with plain torch


def main(config: Config) -> None:
    """Measures all cases; exits with 1 if one of ours was wrong or failed."""
    device = pick_device(config.device)
    packages = ("torch-optimi", "bitsandbytes", "torchao")
    report = reporter(config.run_dir, "optimizer", packages)
    params = make_params(config, device)
    count = sum(p.numel() for p in params)
    shape, dtype = f"{config.model.name}: {len(params)} tensors", str(params[0].dtype)[6:]
    failed, base = [], None
    for case, build in cases(device).items():
        try:
            if case in OURS:
                check(params, OURS[case][0])
            step, optimizer = build(params)
            ms = median_ms(step, device, REPEATS)
            state_bytes = round(num_state_bytes(optimizer) / count, 3)
            del step, optimizer
        except (RuntimeError, ValueError, AssertionError, ImportError) as error:
            wrong = isinstance(error, AssertionError)
            correct = False if wrong else None
            report(case, shape, dtype, correct=correct, reason=reason_of(error), elements=count)
            failed += [case] if case in OURS else []
            continue
        finally:
            if device.type == "cuda":
                torch.cuda.empty_cache()
        base = ms if case == BASE else base
        bytes_each = OURS[case][1] if case in OURS and dtype == "float32" else None
        rate = bytes_each and bytes_each * count / ms / 1e6
        report(
            case, shape, dtype, ms, rate, BASE if base else None, base and base / ms,
            True if case in OURS else None, elements=count, rate_unit="GB/s",
            state_bytes=state_bytes,
        )  # fmt: skip
    if failed:
        sys.exit(f"no number for {', '.join(failed)}; their lines say why")


def make_params(config: Config, device: torch.device) -> list[Tensor]:
    """Random parameters of the model's shapes, with random gradients."""
    with torch.device("meta"):
        model = build_model(config.model)
    set_parameter_dtype(model, config.precision.autocast)
    torch.manual_seed(config.seed)
    params = []
    for p in model.parameters():
        params.append(torch.nn.Parameter(torch.randn(p.shape, device=device).to(p.dtype)))
        params[-1].grad = (torch.randn(p.shape, device=device) * 1e-3).to(p.dtype)
    return params


def num_state_bytes(optimizer: torch.optim.Optimizer | EightBitAdamW) -> int:
    """Bytes of the tensors of an optimizer's state, with the codes and scales of 8-bit ones."""
    if isinstance(optimizer, EightBitAdamW):
        return num_state_bytes(optimizer.library)
    num_bytes = {}  # by address, since tensors may be shared
    for state in optimizer.state.values():
        for value in state.values():
            inner = getattr(value, "__tensor_flatten__", None)
            parts = [getattr(value, name) for name in inner()[0]] if inner else [value]
            num_bytes |= {part.data_ptr(): part.nbytes for part in parts if hasattr(part, "nbytes")}
    return sum(num_bytes.values())


def cases(device: torch.device) -> dict[str, Callable]:
    """For each case `build(params)`, which returns a step without arguments and the optimizer."""
    options = {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.2}

    def library(module: str, name: str, **more: object) -> Callable:
        def build(params: list[Tensor]) -> tuple:
            optimizer = getattr(importlib.import_module(module), name)(params, **options, **more)
            return optimizer.step, optimizer

        return build

    def with_clipping(params: list[Tensor]) -> tuple:
        optimizer = torch.optim.AdamW(params, **options, fused=True)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1e9, foreach=True)  # its cost, without effect
            optimizer.step()

        return step, optimizer

    def recorded(kind: type[EightBitAdamW]) -> Callable:
        def build(params: list[Tensor]) -> tuple:
            optimizer = kind([{"params": [(f"{i}", p) for i, p in enumerate(params)]}], options)
            return optimizer.step, optimizer

        return build

    builders = {BASE: library("torch.optim", "AdamW", fused=True)}
    for case, (more, _) in OURS.items():
        builders[case] = library("lowprec.optim", "StableAdamW", **more)
    builders["torch AdamW foreach"] = library("torch.optim", "AdamW", foreach=True)
    builders["torch AdamW fused + clip_grad_norm_"] = with_clipping
    eight_bit = {"torchao": TorchaoAdamW8bit}  # last, as it compiles
    if device.type == "cuda":
        builders["optimi AdamW triton"] = library("optimi", "AdamW", triton=True)
        builders["optimi StableAdamW triton"] = library("optimi", "StableAdamW", triton=True)
        eight_bit = {"bitsandbytes": BitsAndBytesAdamW8bit, **eight_bit}
    builders["optimi StableAdamW foreach"] = library("optimi", "StableAdamW", foreach=True)
    for name, kind in eight_bit.items():
        builders[f"{name} AdamW8bit"] = library(f"{name}.optim", "AdamW8bit")
        builders[f"{name} AdamW8bit, recorded"] = recorded(kind)
    return builders


def check(params: list[Tensor], options: dict) -> None:
    """AssertionError if some tensors do not move as in plain torch in three steps."""
    some = params[:: max(1, len(params) // CHECKED)]
    copies = [[torch.nn.Parameter(p.detach().clone()) for p in some] for _ in range(2)]
    optimizers = [
        StableAdamW(copies[0], lr=1e-2, **options),
        StableAdamW(copies[1], lr=1e-2, **{**options, "fused": False}),
    ]
    for size in (1.0, 100.0, 1.0):  # a jump that is clipped
        for own_params, optimizer in zip(copies, optimizers, strict=True):
            for p, original in zip(own_params, some, strict=True):
                p.grad = original.grad * size
            optimizer.step()
    for actual, expected in zip(*copies, strict=True):
        torch.testing.assert_close(actual, expected)
    actual, expected = (optimizer.statistics for optimizer in optimizers)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6, equal_nan=True)


if __name__ == "__main__":
    run_command(main, "train")
