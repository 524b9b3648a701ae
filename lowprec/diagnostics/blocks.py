"""Magnitudes of the features and attention logits in each block of a model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

BLOCK_STATISTICS = ("feature_mean", "feature_max", "logit_max")


class BlockProbe:
    """Measures some modules of a model on a few samples, without any effect on training.

    `forward` calls the model on the samples that the probe receives: in evaluation mode (patch
    dropout keeps all patches), eagerly even if blocks are compiled, with the random state restored.
    Source: E[abs(x_k)], appendix C, arXiv:2304.13013.
    """

    def __init__(self, model: nn.Module, blocks: list[nn.Module], forward: Callable[[Any], Any]):
        self.model, self.forward = model, forward
        self.blocks = {name: block for name, block in model.named_modules() if block in blocks}
        self.names = list(self.blocks)

    @torch.no_grad()
    def __call__(self, samples: Any) -> Tensor:
        """float32 [blocks, 3]: mean and largest magnitude of the output, largest attention logit.

        The logit is NaN for attention without a `largest_logit` method, such as open_clip's own.
        """
        rows_by_name = {name: [torch.nan] * len(BLOCK_STATISTICS) for name in self.blocks}
        handles = []
        for name, block in self.blocks.items():
            row = rows_by_name[name]
            handles.append(block.register_forward_hook(partial(_keep_features, row)))
            for module in block.modules():
                if hasattr(module, "largest_logit"):
                    hook = partial(_keep_logit, row)
                    handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        modes = {module: module.training for module in self.model.modules()}
        device = next(self.model.parameters()).device
        restored = torch.random.fork_rng([device] if device.type == "cuda" else [])
        self.model.eval()
        try:
            with torch.compiler.set_stance("force_eager"), restored:
                self.forward(samples)
        finally:
            for module, mode in modes.items():
                module.training = mode
            for handle in handles:
                handle.remove()
        like = {"device": device, "dtype": torch.float32}
        rows = [[torch.as_tensor(x, **like) for x in row] for row in rows_by_name.values()]
        return torch.stack([torch.stack(row) for row in rows])


def _keep_features(row: list, module: nn.Module, inputs: tuple, output: Tensor) -> None:
    magnitudes = output.detach().abs()
    row[:2] = magnitudes.mean(dtype=torch.float32), magnitudes.max()


def _keep_logit(row: list, module: nn.Module, inputs: tuple, kwargs: dict) -> None:
    row[2] = module.largest_logit(inputs[0], kwargs.get("attn_mask"))
