"""Times an optimizer's step over all tensors of a model, beside other libraries'.

    python -m experiments.benchmarks.optimizer model=vit_h14
    python -m experiments.benchmarks.optimizer model=vit_b32 precision.autocast=pure_bf16

Takes the keys of `train`; the model says which tensors, `precision.autocast` their dtype. Gradients
are random and stay the same. Ours leave ten statistics of every tensor, the others none. Ours count
only if some tensors move as the definition in plain torch moves them. `ratio` is to torch's fused
AdamW. `state_bytes`: of the optimizer's state, a parameter. 8-bit AdamW of a library is timed alone
and with the statistics that a run with it records. One JSON line a case goes to
`runs/bench/optimizer/<time>.jsonl`.
"""

import importlib
import sys
from collections.abc import Callable

from experiments.benchmarks.report import median_ms, reason_of, reporter
from experiments.entry import run_command
from lowprec.config.schema import Config

BASE = "torch AdamW fused"
OURS = {  # case: (options, bytes read and written of an element with float32 parameters)
    "StableAdamW": ({}, 40),
    "AdamW": ({"clip_threshold": None}, 32),
    "StableAdamW definition": ({"fused": False}, None),
}
REPEATS = 20
CHECKED = 24  # tensors that are held against the definition


def main(config: Config) -> None:
    """Measures all cases; exits with 1 if one of ours was wrong or failed."""
    import torch

    from lowprec.train.build import pick_device

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


def make_params(config: Config, device: object) -> list:
    """Parameters of the model's shapes with a gradient each, random."""
    import torch

    from lowprec.clip.model import build_model
    from lowprec.train.precision import set_parameter_dtype

    with torch.device("meta"):
        model = build_model(config.model)
    set_parameter_dtype(model, config.precision.autocast)
    torch.manual_seed(config.seed)
    params = []
    for p in model.parameters():
        params.append(torch.nn.Parameter(torch.randn(p.shape, device=device).to(p.dtype)))
        params[-1].grad = (torch.randn(p.shape, device=device) * 1e-3).to(p.dtype)
    return params


def num_state_bytes(optimizer: object) -> int:
    """Bytes of the tensors of an optimizer's state, codes and scales of 8-bit ones too."""
    from lowprec.optim.eight_bit import EightBitAdamW

    if isinstance(optimizer, EightBitAdamW):
        return num_state_bytes(optimizer.library)
    found = {}
    for state in optimizer.state.values():
        for value in state.values():
            inner = getattr(value, "__tensor_flatten__", None)
            parts = [getattr(value, name) for name in inner()[0]] if inner else [value]
            found |= {part.data_ptr(): part.nbytes for part in parts if hasattr(part, "nbytes")}
    return sum(found.values())


def cases(device: object) -> dict[str, Callable]:
    """`build(params)` of each case gives its step, a call without arguments, and the optimizer."""
    import torch

    from lowprec.optim.eight_bit import BitsAndBytesAdamW8bit, TorchaoAdamW8bit

    options = {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.2}

    def of(module: str, name: str, **choice: object) -> Callable:
        def build(params: list) -> tuple:
            optimizer = getattr(importlib.import_module(module), name)(params, **options, **choice)
            return optimizer.step, optimizer

        return build

    def clipped(params: list) -> tuple:
        optimizer = torch.optim.AdamW(params, **options, fused=True)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(params, 1e9, foreach=True)  # measured, without effect
            optimizer.step()

        return step, optimizer

    def recorded(kind: type) -> Callable:
        def build(params: list) -> tuple:
            optimizer = kind([{"params": [(f"{i}", p) for i, p in enumerate(params)]}], options)
            return optimizer.step, optimizer

        return build

    found = {BASE: of("torch.optim", "AdamW", fused=True)}
    for case, (choice, _) in OURS.items():
        found[case] = of("lowprec.optim", "StableAdamW", **choice)
    found["torch AdamW foreach"] = of("torch.optim", "AdamW", foreach=True)
    found["torch AdamW fused + clip_grad_norm_"] = clipped
    if device.type == "cuda":
        found["optimi AdamW triton"] = of("optimi", "AdamW", triton=True)
        found["optimi StableAdamW triton"] = of("optimi", "StableAdamW", triton=True)
    found["optimi StableAdamW foreach"] = of("optimi", "StableAdamW", foreach=True)
    kinds = {"bitsandbytes": BitsAndBytesAdamW8bit} if device.type == "cuda" else {}
    kinds["torchao"] = TorchaoAdamW8bit  # last, as it compiles
    for library, kind in kinds.items():
        found[f"{library} AdamW8bit"] = of(f"{library}.optim", "AdamW8bit")
        found[f"{library} AdamW8bit, recorded"] = recorded(kind)
    return found


def check(params: list, choice: dict) -> None:
    """AssertionError if three steps of some tensors are not the definition's."""
    import torch

    from lowprec.optim import StableAdamW

    some = params[:: max(1, len(params) // CHECKED)]
    copies = [[torch.nn.Parameter(p.detach().clone()) for p in some] for _ in range(2)]
    optimizers = [
        StableAdamW(copies[0], lr=1e-2, **choice),
        StableAdamW(copies[1], lr=1e-2, **{**choice, "fused": False}),
    ]
    for size in (1.0, 100.0, 1.0):  # a jump, so that clipping has something to clip
        for of, optimizer in zip(copies, optimizers, strict=True):
            for p, original in zip(of, some, strict=True):
                p.grad = original.grad * size
            optimizer.step()
    for found, expected in zip(*copies, strict=True):
        torch.testing.assert_close(found, expected)
    found, expected = (optimizer.statistics for optimizer in optimizers)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6, equal_nan=True)


if __name__ == "__main__":
    run_command(main, "train")
