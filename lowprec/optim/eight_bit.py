"""AdamW with 8-bit moments from bitsandbytes or torchao, with the interface of StableAdamW.

The update is the library's. This file decides which gradients are applied and which moments stay in
32 bits, computes statistics and gives the moments to checkpoints as plain tensors.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowprec.config.schema import STATISTICS, UNKNOWN_WITH_8_BITS
from lowprec.optim.clipping import clip_global_norm
from lowprec.optim.schedules import matching
from lowprec.optim.state import MOMENTS

BLOCK = 256  # elements that share a scale, in both libraries by default


class EightBitAdamW:
    """Abstract base: a library's AdamW with the attributes of StableAdamW that training uses.

    `step()` leaves `statistics`, `grad_norm`, `clipped_grad_norm` and `all_finite`; `clip_norm`,
    `skip`, `grad_scale`, `found_inf` and `frozen` work as in StableAdamW. Differences:

    - Statistics of the second moment (rms, u_min, u_mean, u_max) and the update norm are NaN.
    - The host reads once per step which gradients are finite, so no CUDA graph can capture it.
    - Gradients are divided by `grad_scale` and clipped in place; those not applied become None.
    - 16-bit parameters lose small updates to rounding: there is no compensation.

    Groups hold named float32 parameters, already on their device. A parameter keeps 32-bit moments
    if it has fewer than `min_8bit_size` elements or a pattern in `override_32bit` matches its name
    or that of a module above it; ValueError if a pattern matches nothing. Source: arXiv:2110.02861.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling to step()

    def __init__(
        self,
        library: torch.optim.Optimizer,
        *,
        min_8bit_size: int = 4096,
        override_32bit: Sequence[str] = (),
        clip_norm: float | None = None,
        skip: str = "step",
    ):
        self.library = library
        self.clip_norm, self.skip = clip_norm, skip
        self.param_groups = library.param_groups
        self.params = [p for group in self.param_groups for p in group["params"]]
        self.names = [name for group in self.param_groups for name in group["param_names"]]
        wide = matching(self.names, override_32bit)
        for name, p in zip(self.names, self.params, strict=True):
            self._start(p, is_wide=name in wide or p.numel() < min_8bit_size)
        self.frozen: Tensor | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch."""
        self.library.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """Updates every parameter that has a gradient."""
        rows = [i for i, p in enumerate(self.params) if p.grad is not None]
        grads = [self.params[i].grad for i in rows]
        scale = getattr(self, "grad_scale", None)  # set and deleted by GradScaler
        if scale is not None:
            torch._foreach_mul_(grads, 1 / scale.to(grads[0].device))
        norms = torch.stack(torch._foreach_norm(grads)).float()
        clipping = clip_global_norm(norms, self.clip_norm)
        self.grad_norm, self.clipped_grad_norm, factor = clipping
        values = {name: norms.new_zeros(len(self.params)) for name in STATISTICS}
        values["grad_norm"][rows] = norms
        values["grad_abs_max"][rows] = torch.stack(torch._foreach_norm(grads, math.inf))
        if self.clip_norm is not None:
            torch._foreach_mul_(grads, factor)
        finite = norms.isfinite()
        self.all_finite = finite.all()
        vetoes = [v for v in (getattr(self, "found_inf", None), self.frozen) if v is not None]
        vetoes = [(v.to(norms.device) != 0).reshape(1) for v in vetoes]
        read = torch.cat([finite, *vetoes]).tolist()  # the host waits here
        finite, vetoes = read[: len(rows)], read[len(rows) :]
        for i, grad, is_finite in zip(rows, grads, finite, strict=True):
            if not is_finite:
                values["grad_inf"][i] = grad.isinf().sum()
                values["grad_nan"][i] = grad.isnan().sum()
                self.params[i].grad = None  # which the library leaves out
        if not any(vetoes) and (self.skip == "tensor" or all(finite)):
            self.library.step()
        values["param_norm"] = torch.stack(torch._foreach_norm(self.params))
        for name in UNKNOWN_WITH_8_BITS:
            values[name].fill_(math.nan)
        self.statistics = torch.stack([values[name] for name in STATISTICS], dim=1)

    def states(self) -> dict[str, dict[str, Tensor]]:
        """The optimizer's own tensors of the moments, by kind and parameter's name.

        exp_avg and exp_avg_sq have the parameter's shape and are float32 or uint8 codes. For codes,
        `<kind>_scale` holds the scale of each block and `<kind>_levels` the values of the codes.
        """
        tensors: dict[str, dict[str, Tensor]] = {}
        for name, p in zip(self.names, self.params, strict=True):
            for kind, values in zip(MOMENTS, self._moments(self.library.state[p]), strict=True):
                values, scale, levels = values
                tensors.setdefault(kind, {})[name] = values
                if scale is not None:
                    tensors.setdefault(f"{kind}_scale", {})[name] = scale
                    tensors.setdefault(f"{kind}_levels", {}).setdefault("levels", levels)
        return tensors

    @property
    def steps(self) -> list[float]:
        """Number of updates of each parameter, in the order of `names`."""
        return [float(self.library.state[p]["step"]) for p in self.params]

    @steps.setter
    def steps(self, steps: list[float]) -> None:
        for p, step in zip(self.params, steps, strict=True):
            is_tensor = isinstance(self.library.state[p]["step"], Tensor)
            self.library.state[p]["step"] = torch.tensor(step) if is_tensor else int(step)

    def _start(self, p: Tensor, is_wide: bool) -> None:
        """Initializes the parameter's state with zeros."""
        raise NotImplementedError

    def _moments(self, state: dict) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        """Values or codes, scales and levels of a parameter's exp_avg and exp_avg_sq."""
        raise NotImplementedError


class TorchaoAdamW8bit(EightBitAdamW):
    """torchao.optim.AdamW8bit(groups, **rule), on a GPU or a CPU; it compiles for each shape.

    Tensors whose size is not a multiple of BLOCK have 32-bit moments, too. Written for 0.17.
    """

    def __init__(self, groups: list[dict], rule: dict, **options):
        from torchao.optim import AdamW8bit

        super().__init__(AdamW8bit(groups, **rule), **options)

    def _start(self, p: Tensor, is_wide: bool) -> None:
        from torchao.optim.subclass_8bit import OptimState8bit

        state = self.library.state[p]
        state["step"] = torch.tensor(0.0)
        for kind, signed in zip(MOMENTS, (True, False), strict=True):
            if is_wide or p.numel() % BLOCK:
                state[kind] = torch.zeros_like(p)
            else:
                state[kind] = OptimState8bit.zeros(p.shape, signed, BLOCK, p.device, p.dtype)

    def _moments(self, state: dict) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        moments = (state[kind] for kind in MOMENTS)
        return [
            (x, None, None) if type(x) is Tensor else (x.codes, x.scale, x.qmap) for x in moments
        ]


class BitsAndBytesAdamW8bit(EightBitAdamW):
    """bitsandbytes.optim.AdamW8bit(groups, **rule), on a GPU only; written for 0.49.

    With `is_paged`, moments of 100,000 elements and more are in CUDA managed memory, which moves to
    the host when the GPU is full. More of it than the GPU has free can hang the GPU for all users.
    """

    def __init__(self, groups: list[dict], rule: dict, **options):
        from bitsandbytes.optim import AdamW8bit

        super().__init__(AdamW8bit(groups, **rule), **options)

    def _start(self, p: Tensor, is_wide: bool) -> None:
        # its own overrides are global; min_8bit_size is read in init_state only
        self.library.args.min_8bit_size = math.inf if is_wide else 0
        self.library.init_state(self.param_groups[0], p, -1, -1)

    def _moments(self, state: dict) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
        return [
            (state[f"state{i}"], state.get(f"absmax{i}"), state.get(f"qmap{i}")) for i in (1, 2)
        ]
