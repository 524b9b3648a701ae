"""Which parameters decay."""

from torch import nn


def param_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Two groups of named parameters: matrices and embeddings decay, the rest does not.

    Gains, biases, layer-scale vectors and the logit scale have fewer than two dimensions.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decayed = [(name, p) for name, p in named if p.ndim >= 2]
    others = [(name, p) for name, p in named if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
