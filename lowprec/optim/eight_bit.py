"""AdamW with 8-bit moments, of bitsandbytes or torchao, as a step of training wants an optimizer.

The update is the library's; here is what surrounds it: which tensors are updated, the statistics,
which moments stay in 32 bits, and the moments as plain tensors for checkpoints.
"""

import fnmatch
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lowprec.optim.stable_adamw import STATISTICS

CHUNK = 2**25  # elements of the parameters copied at a time, for the norms of their updates
BLOCK = 256  # elements that share a scale, in both libraries by default

Moment = tuple[Tensor, Tensor | None, Tensor | None]  # numbers or codes, scales, what codes mean


class EightBitAdamW:
    """AdamW of a library with the attributes of StableAdamW that training uses; an abstract base.

    After `step()` there are `statistics`, `grad_norm`, `clipped_grad_norm` (the same) and
    `all_finite`; `skip`, `grad_scale`, `found_inf` and `frozen` are obeyed as there. It differs:

    - A statistic of the second moment (rms, u_min, u_mean, u_max) is NaN: the libraries update it
      and forget it, and 8 bits of it are no basis for RMS_t.
    - The norm of an update is that of `p_new - (1 - lr weight_decay) p_old`, from a copy of at
      most CHUNK elements or one tensor. All statistics move 36 bytes an element beside the update.
    - The host reads once a step which gradients are finite, so no CUDA graph can hold it.
    - Gradients are divided by `grad_scale` in place. A tensor that `skip="tensor"` leaves out
      keeps its own step count.
    - 16-bit parameters lose small updates to rounding: there is no compensation.

    Groups are of named float32 parameters on the device where they stay. Moments of a parameter are
    32-bit if it has fewer than `min_8bit_size` elements or one of the patterns `override_32bit`
    matches its name or that of a module which it is in. ValueError where a pattern matches none.
    Source: arXiv:2110.02861.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling to step()

    def __init__(
        self,
        library: torch.optim.Optimizer,
        *,
        min_8bit_size: int = 4096,
        override_32bit: Sequence[str] = (),
        skip: str = "step",
    ):
        self.library = library
        self.skip = skip
        self.param_groups = library.param_groups
        self.params = [p for group in self.param_groups for p in group["params"]]
        self.names = [name for group in self.param_groups for name in group["param_names"]]
        wide = matching(self.names, override_32bit)
        for name, p in zip(self.names, self.params, strict=True):
            self._start(p, is_wide=name in wide or p.numel() < min_8bit_size)
        self.frozen: Tensor | None = None
        self.all_finite: Tensor | None = None
        self.statistics: Tensor | None = None
        self.grad_norm: Tensor | None = None
        self.clipped_grad_norm: Tensor | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        self.library.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """One update of every tensor that has a gradient."""
        having = [i for i, p in enumerate(self.params) if p.grad is not None]
        if not having:
            return
        grads = [self.params[i].grad for i in having]
        scale = getattr(self, "grad_scale", None)  # set and deleted by GradScaler
        if scale is not None:
            torch._foreach_mul_(grads, 1 / scale.to(grads[0].device))
        norms = torch.stack(torch._foreach_norm(grads)).float()
        allowed, finite = self._decide(norms)
        table = torch.full((len(self.params), len(STATISTICS)), math.nan, device=norms.device)
        for name in ("grad_norm", "update_norm", "grad_abs_max", "grad_inf", "grad_nan"):
            _column(table, name).zero_()
        _column(table, "grad_norm")[having] = norms
        _column(table, "grad_abs_max")[having] = torch.stack(torch._foreach_norm(grads, math.inf))
        for i, grad, is_finite in zip(having, grads, finite, strict=True):
            if not is_finite:
                _column(table, "grad_inf")[i] = grad.isinf().sum()
                _column(table, "grad_nan")[i] = grad.isnan().sum()
        chosen = {i for i, is_finite in zip(having, finite, strict=True) if allowed and is_finite}
        if self.skip == "tensor" or all(finite):
            self._update(chosen, _column(table, "update_norm"))
        _column(table, "param_norm")[:] = torch.stack(torch._foreach_norm(self.params))
        self.statistics = table
        self.grad_norm = self.clipped_grad_norm = torch.linalg.vector_norm(norms)

    def _decide(self, norms: Tensor) -> tuple[bool, list[bool]]:
        """Whether anything may be updated, and which gradients are finite: read from the device."""
        finite = norms.isfinite()
        self.all_finite = finite.all()
        vetoes = [v for v in (getattr(self, "found_inf", None), self.frozen) if v is not None]
        vetoes = [(v.to(norms.device) != 0).reshape(1) for v in vetoes]
        read = torch.cat([finite, *vetoes]).tolist()
        return not any(read[len(norms) :]), read[: len(norms)]

    def _update(self, chosen: set[int], changes: Tensor) -> None:
        """The library's step of these parameters, chunk by chunk; norms of what it changed."""
        for group, numbers in self._chunks(chosen):
            params = [self.params[i] for i in numbers]
            kept = torch._foreach_mul(params, 1 - float(group["lr"]) * group["weight_decay"])
            self.library.param_groups = [{**group, "params": params}]
            try:
                self.library.step()
            finally:
                self.library.param_groups = self.param_groups
            torch._foreach_sub_(kept, params)
            changes[numbers] = torch.stack(torch._foreach_norm(kept))

    def _chunks(self, chosen: set[int]) -> Iterator[tuple[dict, list[int]]]:
        """The chosen parameters, by number, of one group and CHUNK elements at a time."""
        start = 0
        for group in self.param_groups:
            numbers, size = [], 0
            for i in range(start, start := start + len(group["params"])):
                if i not in chosen:
                    continue
                if numbers and size + self.params[i].numel() > CHUNK:
                    yield group, numbers
                    numbers, size = [], 0
                numbers.append(i)
                size += self.params[i].numel()
            if numbers:
                yield group, numbers

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Every moment's tensors, the optimizer's own, by kind and parameter's name.

        exp_avg and exp_avg_sq, in the parameter's shape, are float32 or uint8 codes; then kind
        `_scale` holds the scale of each block and kind `_levels` what the codes stand for, once.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for name, p in zip(self.names, self.params, strict=True):
            for kind, (values, scale, levels) in self._moments(p).items():
                found.setdefault(kind, {})[name] = values
                if scale is not None:
                    found.setdefault(f"{kind}_scale", {})[name] = scale
                    found.setdefault(f"{kind}_levels", {}).setdefault("levels", levels)
        return found

    @property
    def steps(self) -> list[float]:
        """Updates so far of each parameter, in the order of `names`."""
        return [float(self.library.state[p]["step"]) for p in self.params]

    @steps.setter
    def steps(self, steps: list[float]) -> None:
        for p, step in zip(self.params, steps, strict=True):
            kind = type(self.library.state[p]["step"])
            self.library.state[p]["step"] = torch.tensor(step) if kind is Tensor else kind(step)

    def _start(self, p: Tensor, is_wide: bool) -> None:
        """Sets the parameter's state to zero."""
        raise NotImplementedError

    def _moments(self, p: Tensor) -> dict[str, Moment]:
        """exp_avg and exp_avg_sq of a parameter."""
        raise NotImplementedError


class TorchaoAdamW8bit(EightBitAdamW):
    """torchao.optim.AdamW8bit(groups, **rule), on a GPU or a CPU; compiled for each shape anew.

    Also 32-bit: moments of a tensor whose elements are no multiple of BLOCK. Written for 0.17.
    """

    def __init__(self, groups: list[dict], rule: dict, **options):
        from torchao.optim import AdamW8bit

        super().__init__(AdamW8bit(groups, **rule), **options)

    def _start(self, p: Tensor, is_wide: bool) -> None:
        from torchao.optim.subclass_8bit import OptimState8bit

        state = self.library.state[p]
        state["step"] = torch.tensor(0.0)
        for kind, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            if is_wide or p.numel() % BLOCK:
                state[kind] = torch.zeros_like(p)
            else:
                state[kind] = OptimState8bit.zeros(p.shape, signed, BLOCK, p.device, p.dtype)

    def _moments(self, p: Tensor) -> dict[str, Moment]:
        found = {}
        for kind in ("exp_avg", "exp_avg_sq"):
            x = self.library.state[p][kind]
            found[kind] = (x, None, None) if type(x) is Tensor else (x.codes, x.scale, x.qmap)
        return found


class BitsAndBytesAdamW8bit(EightBitAdamW):
    """bitsandbytes.optim.AdamW8bit(groups, **rule), whose kernels run on a GPU alone.

    With `is_paged` moments of 100,000 elements and more lie in CUDA's managed memory, which moves
    to the host when the GPU is full. More of it than the GPU has free can hang a GPU, also for
    others that share it. Written for 0.49.
    """

    def __init__(self, groups: list[dict], rule: dict, **options):
        from bitsandbytes.optim import AdamW8bit

        super().__init__(AdamW8bit(groups, **rule), **options)

    def _start(self, p: Tensor, is_wide: bool) -> None:
        # its own overrides are of the process, not of an optimizer; the size is read here alone
        self.library.args.min_8bit_size = math.inf if is_wide else 0
        self.library.init_state(self.param_groups[0], p, -1, -1)

    def _moments(self, p: Tensor) -> dict[str, Moment]:
        state = self.library.state[p]
        return {
            kind: (state[f"state{i}"], state.get(f"absmax{i}"), state.get(f"qmap{i}"))
            for i, kind in enumerate(("exp_avg", "exp_avg_sq"), 1)
        }


def matching(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """The parameters that a pattern matches, by their own name or a module's above them.

    `*` and `?` match dots too. ValueError names a pattern that matches nothing.
    """
    found = set()
    for pattern in patterns:
        chosen = {
            name
            for name in names
            for end in range(1, name.count(".") + 2)
            if fnmatch.fnmatchcase(".".join(name.split(".")[:end]), pattern)
        }
        if not chosen:
            raise ValueError(f"{pattern!r} matches no module and no parameter, such as {names[0]}")
        found |= chosen
    return found


def _column(table: Tensor, statistic: str) -> Tensor:
    return table[:, STATISTICS.index(statistic)]
