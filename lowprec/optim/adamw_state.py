"""What AdamW keeps of every tensor: moments and a count of updates; checked, loaded, copied."""

import torch
from torch import Tensor

from lowprec.optim.on_device import index_on
from lowprec.optim.reference import wide_dtype
from lowprec.optim.rules import OURS, check_rule

MOMENTS = ("exp_avg", "exp_avg_sq")
FOREIGN = "only a state of StableAdamW or torch.optim.AdamW, without amsgrad and maximize, loads"


class AdamWState(torch.optim.Optimizer):
    """Groups and state of StableAdamW, to which `attributes` and `_forget` of its own belong.

    `state[p]` holds exp_avg and exp_avg_sq, float32 (float64 for float64); of a 16-bit parameter
    also compensation, in its dtype; and updates, 0-d, a view: the counts of all tensors are one
    tensor on the device, so that a step counts in one operation. It is not called step, as the
    count of torch's AdamW, which must not take our moments for its own: ours are debiased.
    """

    attributes: tuple[str, ...] = ()  # what a copy takes along, beside groups and state

    def add_param_group(self, param_group: dict) -> None:
        """As torch's; ValueError where an option is out of range or a parameter complex."""
        check_rule({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._forget()
        for p in self.param_groups[-1]["params"]:
            if p.is_complex():
                name = self._called(p)
                self.param_groups.pop()
                raise ValueError(f"{name} is complex: only real parameters will do")

    @property
    def names(self) -> list[str]:
        """Names of the tensors in the order of `statistics`."""
        named = [group.get("param_names") for group in self.param_groups]
        if any(names is None for names in named):
            raise ValueError("names need named parameters: StableAdamW(model.named_parameters())")
        return [name for names in named for name in names]

    @property
    def steps(self) -> list[float]:
        """Updates so far of each tensor, in the order of `statistics`: read from the device."""
        return self._counts().tolist()

    @steps.setter
    def steps(self, steps: list[float]) -> None:
        self._steps = None
        counts = self._counts()
        if len(steps) != len(counts):
            raise ValueError(f"steps of {len(steps)} tensors for an optimizer of {len(counts)}")
        counts.copy_(torch.tensor(steps))

    def __getstate__(self) -> dict:
        return super().__getstate__() | {name: getattr(self, name) for name in self.attributes}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._forget()

    def load_state_dict(self, state_dict: dict) -> None:
        """As torch's, and of torch.optim.AdamW too, whose groups lack some options: ours stay.

        Moments keep their own dtype (torch casts them to the parameter's); AdamW's are debiased.
        ValueError, before anything is loaded, where the state is neither's or of other shapes.
        """
        groups = [dict(group) for group in state_dict["param_groups"]]
        for group, ours in zip(groups, self.param_groups, strict=False):
            _check_is_adamw(group)
            for name in OURS:
                group.setdefault(name, ours[name])
            check_rule(group)
        numbers = [(n, group["betas"]) for group in groups for n in group["params"]]
        rows = zip(self._params(), numbers, strict=False)  # torch compares the lengths
        states = state_dict["state"]
        found = [(p, states[n], betas) for p, (n, betas) in rows if n in states]
        for p, state, _ in found:
            self._check_fits(p, state)
        super().load_state_dict({**state_dict, "param_groups": groups})
        for p, state, betas in found:
            self.state[p] = _adopted(p, state, betas)

    def _check_fits(self, p: Tensor, state: dict) -> None:
        if not (state.keys() >= {*MOMENTS} and state.keys() & {"updates", "step"}):
            raise ValueError(f"{FOREIGN}: {self._called(p)} has {', '.join(map(str, state))}")
        for name in MOMENTS:
            if state[name].shape != p.shape:
                what = f"{tuple(state[name].shape)}, not {tuple(p.shape)}"
                raise ValueError(f"{name} of {self._called(p)} has the shape {what}")

    def _forget(self) -> None:
        """Begins anew what is kept between steps beside the state."""
        self._steps: Tensor | None = None

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _called(self, p: Tensor) -> str:
        """A tensor for messages: its number, and its name where it has one."""
        number = next(i for i, other in enumerate(self._params()) if other is p)
        named = all("param_names" in group for group in self.param_groups)
        return f"parameter {number}" + (f" ({self.names[number]})" if named else "")

    def _states(self, params: list[Tensor], numbers: tuple[int, ...]) -> list[dict]:
        """Of these tensors, `numbers` among all; what has none begins at zero."""
        counts = self._counts()
        for i, p in zip(numbers, params, strict=True):
            if "exp_avg" not in self.state[p]:
                self.state[p].update(_zero_state(p), updates=counts[i].zero_())
        return [self.state[p] for p in params]

    def _counts(self) -> Tensor:
        """Updates so far [tensors], on the device; `updates` of each state is a view of it."""
        params = self._params()
        device = params[0].device
        if self._steps is None or len(self._steps) != len(params) or self._steps.device != device:
            states = [self.state.get(p, {}) for p in params]
            of = {"dtype": torch.float32, "device": device}
            self._steps = torch.stack(
                [torch.as_tensor(s.get("updates", 0.0), **of) for s in states]
            )
            for i, state in enumerate(states):
                if state:
                    state["updates"] = self._steps[i]
        return self._steps

    def _count(self, apply: Tensor, numbers: tuple[int, ...]) -> Tensor:
        """Adds what is applied, in place, so that a graph repeats it; the counts of these."""
        counts = self._counts()
        if len(numbers) == len(counts):
            return counts.add_(apply)
        index = index_on(numbers, counts.device)
        return counts.index_add_(0, index, apply)[index]


def _zero_state(p: Tensor) -> dict[str, Tensor]:
    """Moments, in the order of the parameter's memory, and what its rounding lost."""
    kinds = dict.fromkeys(MOMENTS, wide_dtype(p))
    if wide_dtype(p) != p.dtype:
        kinds["compensation"] = p.dtype
    return {name: torch.zeros_like(p, dtype=dtype) for name, dtype in kinds.items()}


def _adopted(p: Tensor, found: dict, betas: tuple[float, float]) -> dict[str, Tensor]:
    """A parameter's state from a loaded one, of ours or of torch's AdamW."""
    state = _zero_state(p)
    for name in state.keys() & found.keys():
        state[name].copy_(found[name])
    if "updates" in found:
        return {**state, "updates": found["updates"]}
    t = torch.as_tensor(found["step"], dtype=torch.float64)
    for name, beta in zip(MOMENTS, betas, strict=True):
        state[name].div_(1 - beta ** t.clamp(min=1))
    return {**state, "updates": t}


def _check_is_adamw(group: dict) -> None:
    """ValueError where a group's rule is not that of AdamW, or has what ours does not."""
    is_adamw = "betas" in group and group.get("decoupled_weight_decay", True)
    if not is_adamw or group.get("amsgrad") or group.get("maximize"):
        raise ValueError(FOREIGN)
