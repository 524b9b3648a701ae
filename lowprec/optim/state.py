"""A parameter's optimizer state: zero, or converted from and to torch.optim.AdamW's.

torch stores the biased moments m; ours are debiased: v = m / (1 - beta^t).
"""

import torch
from torch import Tensor

from lowprec.optim.adamw_update import wide_dtype

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = {"step", "updates", "compensation", *MOMENTS}
FOREIGN = "only StableAdamW's and torch.optim.AdamW's states (no amsgrad or maximize) can be loaded"


def zero_state(p: Tensor) -> dict[str, Tensor]:
    """Moments, and for a 16-bit parameter the compensation, in the parameter's order in memory."""
    dtypes = dict.fromkeys(MOMENTS, wide_dtype(p))
    if wide_dtype(p) != p.dtype:
        dtypes["compensation"] = p.dtype
    return {name: torch.zeros_like(p, dtype=dtype) for name, dtype in dtypes.items()}


def check_is_adamw(group: dict) -> None:
    """ValueError if a saved group is neither StableAdamW's nor torch.optim.AdamW's."""
    is_ours = "clip_threshold" in group
    is_torchs = "amsgrad" in group and group.get("decoupled_weight_decay", True)
    if not (is_ours or is_torchs) or group.get("amsgrad") or group.get("maximize"):
        raise ValueError(f"{FOREIGN}; a group of this one has the options {', '.join(group)}")


def loaded_state(p: Tensor, name: str, saved: dict, betas: tuple) -> dict[str, Tensor]:
    """A state that shares no memory with the saved one; ValueError if that does not fit `p`."""
    count = saved.keys() & {"updates", "step"}
    if not count or not {*MOMENTS} <= saved.keys() <= KINDS:
        raise ValueError(f"{FOREIGN}; {name} has {', '.join(map(str, saved)) or 'no moments'}")
    for kind in MOMENTS:
        if saved[kind].shape != p.shape:
            shapes = f"{tuple(saved[kind].shape)}, not {tuple(p.shape)}"
            raise ValueError(f"{kind} of {name} has the shape {shapes}")
    state = zero_state(p)
    for kind in state.keys() & saved.keys():
        state[kind].copy_(saved[kind])
    t = torch.as_tensor(saved[count.pop()], dtype=torch.float64)
    if "step" in saved:
        for kind, beta in zip(MOMENTS, betas, strict=True):
            state[kind].div_(1 - beta ** t.clamp(min=1))
    return {**state, "updates": t}


def adamw_state(state: dict, betas: tuple) -> dict[str, Tensor]:
    """One of our states in torch.optim.AdamW's layout."""
    t = float(state["updates"])
    moments = zip(MOMENTS, betas, strict=True)
    return {
        "step": torch.tensor(t),
        **{kind: state[kind] * (1 - beta**t) for kind, beta in moments},
    }
