"""Times an optimizer's step over all tensors of a model, against other libraries' optimizers.

    python -m experiments.benchmarks optimizer model=vit_h14
    python -m experiments.benchmarks optimizer model=vit_b32 precision.autocast=pure_bf16

Takes the keys of `train`: the model gives the tensors, `precision.autocast` their dtype. Gradients
are random and constant. Ours record ten statistics of every tensor, the others none, and are timed
only if some tensors move as in plain torch (8-bit moments: but for few elements). `ratio` compares
with torch's fused AdamW. Lines go to `runs/bench/optimizer/<time>.jsonl`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from experiments.benchmarks.measure import Lines, Wrong
from experiments.benchmarks.peers import PACKAGES, library_optimizer
from lowprec.clip.model import build_model
from lowprec.config.schema import Config
from lowprec.nn.timing import median_ms
from lowprec.optim import StableAdamW
from lowprec.train.build import pick_device, set_parameter_dtype

BASE = "torch AdamW fused"
OURS = {  # case: (options, bytes read and written per element of float32 parameters)
    "StableAdamW": ({}, 40),
    "AdamW": ({"clip_threshold": None}, 32),
    "StableAdamW, 8-bit moments": ({"optim_bits": 8}, 26),
    "AdamW, 8-bit moments": ({"clip_threshold": None, "optim_bits": 8}, 20),
    "StableAdamW definition": ({"fused": False}, None),
}
OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.98), "eps": 1e-6, "weight_decay": 0.2}
REPEATS = 20
CHECKED = 24  # tensors that are compared with plain torch
FEW = 1e-3  # share of elements whose 8-bit moments may be rounded to another side


def main(config: Config) -> None:
    """Measures all cases; exits with 1 if one of ours was wrong or failed."""
    device = pick_device(config.device)
    lines = Lines(config.run_dir, "optimizer", device, PACKAGES)
    params = make_params(config, device)
    count = sum(p.numel() for p in params)
    shape, dtype = f"{config.model.name}: {len(params)} tensors", str(params[0].dtype)[6:]
    base_ms = None
    for case, build in cases(device).items():
        options, bytes_each = OURS.get(case, (None, None))
        is_ours = options is not None
        with lines.measurement(case, shape, dtype, is_ours=is_ours, elements=count) as row:
            if is_ours:
                check(params, options)
            optimizer = build(params)
            ms = median_ms(optimizer.step, device, REPEATS)
            base_ms = ms if case == BASE else base_ms
            row.update(ms=ms, rate_unit="GB/s")
            if bytes_each and dtype == "float32":
                row.update(rate=bytes_each * count / ms / 1e6)
            if base_ms:
                row.update(ratio_to=BASE, ratio=base_ms / ms)
            row.update(correct=True if is_ours else None)
        optimizer = None  # before the next case takes its memory
        if device.type == "cuda":
            torch.cuda.empty_cache()
    lines.exit_if_failed()


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


class ClippedAdamW(torch.optim.AdamW):
    """torch's AdamW after `clip_grad_norm_`, of which it has the cost but not the effect."""

    def step(self) -> None:
        """Clips the gradients to a norm that they do not reach, then updates the parameters."""
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1e9, foreach=True)
        super().step()


def cases(device: torch.device) -> dict[str, Callable]:
    """Maps each case to `build(params)`, which returns an optimizer."""

    def library(module: str, name: str, **options: object) -> Callable:
        return library_optimizer(module, name, **OPTIONS, **options)

    builders = {BASE: library("torch.optim", "AdamW", fused=True)}
    for case, (options, _) in OURS.items():
        builders[case] = library("lowprec.optim", "StableAdamW", **options)
    builders["torch AdamW foreach"] = library("torch.optim", "AdamW", foreach=True)
    builders[f"{BASE} + clip_grad_norm_"] = partial(ClippedAdamW, **OPTIONS, fused=True)
    builders["optimi StableAdamW foreach"] = library("optimi", "StableAdamW", foreach=True)
    if device.type == "cuda":
        builders["optimi AdamW triton"] = library("optimi", "AdamW", triton=True)
        builders["optimi StableAdamW triton"] = library("optimi", "StableAdamW", triton=True)
        builders["bitsandbytes AdamW8bit"] = library("bitsandbytes.optim", "AdamW8bit")
    builders["torchao AdamW8bit"] = library("torchao.optim", "AdamW8bit")  # last, as it compiles
    return builders


def check(params: list[Tensor], options: dict) -> None:
    """Raises Wrong if some tensors do not move as in plain torch in three steps."""
    checked = params[:: max(1, len(params) // CHECKED)]
    copies = [[torch.nn.Parameter(p.detach().clone()) for p in checked] for _ in range(2)]
    optimizers = [
        StableAdamW(copies[0], lr=1e-2, **options),
        StableAdamW(copies[1], lr=1e-2, **{**options, "fused": False}),
    ]
    for size in (1.0, 100.0, 1.0):  # a jump that is clipped
        for own_params, optimizer in zip(copies, optimizers, strict=True):
            for p, original in zip(own_params, checked, strict=True):
                p.grad = original.grad * size
            optimizer.step()
    actual, expected = (optimizer.statistics for optimizer in optimizers)
    try:
        if "optim_bits" in options:
            pairs = zip(*copies, strict=True)
            differ = torch.cat([~p.isclose(other, atol=1e-5).flatten() for p, other in pairs])
            assert differ.float().mean() < FEW, f"{differ.sum()} of {len(differ)} elements differ"
        else:
            torch.testing.assert_close(*copies)
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-6, equal_nan=True)
    except AssertionError as error:
        raise Wrong(str(error)) from error
