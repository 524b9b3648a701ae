"""RMS_t and norms of all tensors, read from the state of torch's AdamW after its step."""

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowprec.ops.launch import on_device
from lowprec.optim.adamw_update import PlainStep, Tensors, wide_dtype
from lowprec.optim.fused import AddressTables, FusedStep, first_unfit
from lowprec.optim.state import MOMENTS, lr_on_device
from lowprec.optim.statistics import ShardReduction, all_local, expand_rows, index_on


class MomentReader:
    """Reads `exp_avg` and `exp_avg_sq` of an optimizer; its parameters are on one device.

    Kernels are chosen again only if a moment, the layout of a gradient or the size of a group has
    changed since the last step. Holds no tensors between steps.
    """

    def __init__(self, optimizer: Optimizer, names: list[str], device: torch.device):
        self.optimizer, self.names, self.device = optimizer, names, device
        self._addresses = AddressTables()
        self._key: tuple = ()
        self._grads_at: list[int] = []
        betas = [group.get("betas") or () for group in optimizer.param_groups]
        if others := [len(pair) for pair in betas if pair and len(pair) != 2]:
            kind = type(optimizer).__name__
            raise ValueError(f"{kind} has {others[0]} betas: RMS_t needs the two of Adam")
        if not all(betas):
            raise self._nothing_to_watch()

    def read(self, params: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The global gradient norm, 0-d, and rms, grad_norm and update_norm, [tensors, 3].

        Raises ValueError for sparse gradients and a state without these moments, or of another rule
        than Adam's.
        """
        grads = [p.grad for p in params]
        if any(grad is not None and grad.layout != torch.strided for grad in grads):
            raise ValueError("watch needs dense gradients, and a parameter has a sparse one")
        rows = tuple(i for i, grad in enumerate(grads) if grad is not None and grad.numel())
        if not rows:
            nothing = expand_rows(torch.empty(0, 3, device=self.device), (), len(params))
            return nothing.new_zeros(()), nothing
        if len(rows) < len(params):
            params, grads = ([column[i] for i in rows] for column in (params, grads))
        states = [self.optimizer.state[p] for p in params]
        try:
            moments = [[state[kind] for state in states] for kind in MOMENTS]
        except KeyError:
            raise self._nothing_to_watch() from None
        columns = map(all_local, (params, grads, *moments))
        tensors = Tensors(*columns, *[[None] * len(rows)] * 3)
        with on_device(self.device):
            self._prepare(rows, params, grads, tensors)
            step = self._fused or PlainStep(tensors, self._shards)
            sums = step.observe(self._values(states))
        grad_norms = sums.grad_squares.sqrt()
        rms, update_norms = (sums.ratio_squares / self._sizes).sqrt(), sums.update_squares.sqrt()
        found_inf = getattr(self.optimizer, "found_inf", None)  # of a GradScaler, if fused
        if found_inf is not None:
            is_skipped = found_inf.to(self.device).reshape(()) > 0
            rms = torch.where(is_skipped, math.nan, rms)
            update_norms = torch.where(is_skipped, 0.0, update_norms)
        table = torch.stack([rms, grad_norms, update_norms], dim=1)
        return torch.linalg.vector_norm(grad_norms), expand_rows(table, rows, len(self.names))

    def _nothing_to_watch(self) -> ValueError:
        text = f"{type(self.optimizer).__name__} has no exp_avg and exp_avg_sq to watch"
        return ValueError(f"{text}: use AdamW, Adam or StableAdamW")

    def _prepare(
        self, rows: tuple[int, ...], params: list[Tensor], grads: list[Tensor], tensors: Tensors
    ) -> None:
        """Decides what reads these tensors, unless the last decision still holds."""
        moments = tensors.exp_avgs + tensors.exp_avg_sqs
        layouts = [(x.dtype, x.device, x.shape, x.stride()) for x in tensors.grads]
        if tensors.grads is not grads:
            layouts += [getattr(grad, "placements", None) for grad in grads]
        of_groups = [len(group["params"]) for group in self.optimizer.param_groups]
        key = (of_groups, layouts, [*map(id, moments)], [x.data_ptr() for x in moments])
        grads_at = [x.data_ptr() for x in tensors.grads]
        if key != self._key:
            groups = [i for i, g in enumerate(self.optimizer.param_groups) for _ in g["params"]]
            self._groups = index_on(tuple(groups[i] for i in rows), self.device)
            self._sizes = index_on(tuple(p.numel() for p in params), self.device)
            self._dtype = wide_dtype(max(params, key=lambda p: p.dtype.itemsize))
            self._shards = ShardReduction(params, lambda i: self.names[rows[i]])
            is_fit = first_unfit(tensors) is None
            self._fused = FusedStep(tensors, self._shards, self._addresses) if is_fit else None
        elif self._fused and grads_at != self._grads_at:
            self._fused.point_to(tensors)
        self._key, self._grads_at = key, grads_at

    def _values(self, states: list[dict]) -> Tensor:
        """lr, eps and the factors that debias both moments, [tensors, 4]: see `MomentSums.of`."""
        groups = self.optimizer.param_groups
        for group in groups:
            if group.get("amsgrad"):
                raise ValueError("amsgrad=True: its update is not that of exp_avg_sq")
            decay = group.get("weight_decay")
            if decay and group.get("decoupled_weight_decay") is False:
                raise ValueError(
                    f"weight_decay={decay}: {type(self.optimizer).__name__} adds it to the "
                    "gradient before the moments; watch AdamW instead"
                )
        options = [x for g in groups for x in (g["lr"], g["eps"], *g["betas"])]
        values = _on_device(options, self.device).view(-1, 4)[self._groups]
        if "step" in states[0]:
            t = _on_device([state["step"] for state in states], self.device)
        else:
            t = _on_device([group["step"] for group in groups], self.device)[self._groups]
        values[:, 2:] = (1 - values[:, 2:] ** t[:, None]).reciprocal()
        return values.to(self._dtype)


def _on_device(numbers: list[Tensor | float], device: torch.device) -> Tensor:
    """float64 [numbers] on the device, without a wait for it."""
    devices = {x.device if isinstance(x, Tensor) else None for x in numbers}
    if len(devices) > 1:
        numbers = [x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in numbers]
        numbers = [lr_on_device(x, device) for x in numbers]
    if devices == {None}:
        values = torch.tensor(numbers, dtype=torch.float64)
    else:
        values = torch.stack(all_local(numbers)).double().flatten()
    if values.device.type == "cpu" and device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
