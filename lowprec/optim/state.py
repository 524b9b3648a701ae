"""The options of a parameter group, and a parameter's state, converted from torch's AdamW.

torch stores the biased moments m; ours are debiased: v = m / (1 - beta^t).
"""

import difflib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from lowprec.optim.adamw_update import wide_dtype
from lowprec.optim.eight_bit import BLOCK

OWN_OPTIONS = ("clip_threshold", "clip_weight_decay", "beta2_decay")  # torch's AdamW has none
UNSUPPORTED = ("amsgrad", "maximize", "differentiable")  # options of torch's AdamW
MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")  # of 8-bit moments
TENSORS = (*MOMENTS, "compensation", *SCALES)  # of a parameter's state
FOREIGN = "only StableAdamW's and torch.optim.AdamW's states (no amsgrad or maximize) can be loaded"


def check_options(group: dict) -> None:
    """ValueError names the first option of a group that is out of range or not supported."""
    for name, allowed, is_allowed in (
        ("lr", "a number >= 0", lambda lr: 0 <= float(lr) < math.inf),
        ("betas", "two numbers >= 0 and < 1", lambda b: [0 <= x < 1 for x in b] == [True, True]),
        ("eps", "a number > 0", lambda eps: 0 < eps < math.inf),
        ("weight_decay", "a number >= 0", lambda decay: 0 <= decay < math.inf),
        ("clip_threshold", "None or a number > 0", is_positive_or_none),
        ("beta2_decay", "None or a number > 0", is_positive_or_none),
        *((name, "False, unlike in torch", lambda value: not value) for name in UNSUPPORTED),
    ):
        value = group.get(name)
        try:
            is_fit = not isinstance(value, str) and is_allowed(value)
        except (TypeError, ValueError, RuntimeError):  # of tensors, the last two
            is_fit = False
        if not is_fit:
            raise ValueError(f"{name}={value!r} must be {allowed}")


def check_names(group: dict, options: dict) -> None:
    """ValueError for a misspelled option; other names are allowed, since schedulers add some."""
    for name in group.keys() - options.keys():
        if near := difflib.get_close_matches(name, options, n=1, cutoff=0.9):
            raise ValueError(f"{name}: no such option; nearest: {near[0]}")


def is_positive_or_none(value: float | None) -> bool:
    """Whether an option is None or a positive number (NaN is not)."""
    return value is None or (not isinstance(value, str) and value > 0)


def options_of(group: dict) -> list[float]:
    """betas, beta2_decay, then the last four fields of Hyperparameters; infinity for None."""
    names = ("beta2_decay", "eps", "weight_decay", "clip_threshold", "clip_weight_decay")
    options = (math.inf if group[name] is None else float(group[name]) for name in names)
    return [*group["betas"], *options]


def check_dense(
    params: list[Tensor], grads: list[Tensor], name_of: Callable[[Tensor], str]
) -> None:
    """ValueError names the first parameter that no step takes and says why."""
    device = params[0].device
    for p, grad in zip(params, grads, strict=True):
        if p.is_complex() or grad.layout != torch.strided:
            fault = "is complex" if p.is_complex() else "has a sparse gradient"
            raise ValueError(f"{name_of(p)} {fault}; tensors must be real and dense")
        if p.device != device:
            raise ValueError(f"{name_of(p)} is on {p.device}; the first parameter is on {device}")


def lr_on_device(lr: float | Tensor, device: torch.device) -> Tensor:
    """float64, 0-d; a captured graph reads a learning rate on the device at each replay."""
    if isinstance(lr, Tensor):
        return lr.to(device, torch.float64).reshape(())
    return torch.full((), lr, device=device, dtype=torch.float64)


def zero_state(
    p: Tensor, is_8bit: bool = False, device: torch.device | str | None = None
) -> dict[str, Tensor]:
    """Moments, and for a 16-bit parameter the compensation, in the parameter's order in memory.

    8-bit moments are uint8 codes, with a float32 scale for each `BLOCK`. `device`: None is that of
    the parameter.
    """
    dtypes = dict.fromkeys(MOMENTS, torch.uint8 if is_8bit else wide_dtype(p))
    if wide_dtype(p) != p.dtype:
        dtypes["compensation"] = p.dtype
    options, blocks = {"device": device}, -(-p.numel() // BLOCK)
    state = {kind: torch.zeros_like(p, dtype=dtype, **options) for kind, dtype in dtypes.items()}
    kinds = SCALES if is_8bit else ()
    return state | {kind: p.new_zeros(blocks, dtype=torch.float32, **options) for kind in kinds}


def can_be_8bit(p: Tensor, min_size: int) -> bool:
    """Whether a parameter of at least `min_size` elements can have 8-bit moments."""
    return p.numel() >= min_size and p.is_contiguous() and wide_dtype(p) == torch.float32


def check_is_adamw(group: dict) -> None:
    """ValueError if a saved group is neither StableAdamW's nor torch.optim.AdamW's."""
    is_ours = "clip_threshold" in group
    is_torchs = "amsgrad" in group and group.get("decoupled_weight_decay", True)
    if not (is_ours or is_torchs) or group.get("amsgrad") or group.get("maximize"):
        raise ValueError(f"{FOREIGN}; a group of this one has the options {', '.join(group)}")


def loaded_groups(state_dict: dict, own_groups: list[dict]) -> list[dict]:
    """Copies of saved groups, with options of ours that AdamW lacks; ValueError names a fault."""
    if not state_dict.keys() >= {"state", "param_groups"}:
        raise ValueError(f"{FOREIGN}; this one has {', '.join(list(state_dict)[:5])}")
    groups = [dict(group) for group in state_dict["param_groups"]]
    for group, own_group in zip(groups, own_groups, strict=False):
        check_is_adamw(group)
        for name in OWN_OPTIONS:
            group.setdefault(name, own_group[name])
        check_options(group)
    return groups


def loaded_state(
    p: Tensor, name: str, saved: dict, betas: tuple, is_8bit: bool, device: torch.device | None
) -> dict[str, Tensor]:
    """A state that shares no memory with the saved one; ValueError if that does not fit `p`.

    `device`: as in `zero_state`.
    """
    count = saved.keys() & {"updates", "step"}
    if not count or not {*MOMENTS} <= saved.keys() <= {"step", "updates", *TENSORS}:
        raise ValueError(f"{FOREIGN}; {name} has {', '.join(map(str, saved)) or 'no moments'}")
    for kind in MOMENTS:
        if saved[kind].shape != p.shape:
            shapes = f"{tuple(saved[kind].shape)}, not {tuple(p.shape)}"
            raise ValueError(f"{kind} of {name} has the shape {shapes}")
    if is_8bit != ("exp_avg_scale" in saved):
        saved_bits, bits = (32, 8) if is_8bit else (8, 32)
        raise ValueError(f"{name} has {saved_bits}-bit moments in this state, not {bits}-bit ones")
    state = zero_state(p, is_8bit, device)
    for kind in state.keys() & saved.keys():
        state[kind].copy_(saved[kind])
    t = torch.as_tensor(saved[count.pop()], dtype=torch.float64)
    if "step" in saved:
        for kind, beta in zip(MOMENTS, betas, strict=True):
            state[kind].div_(1 - beta ** t.clamp(min=1))
    return {**state, "updates": t}
