"""From a batch to its loss."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lowprec.data.loader import Batch
from lowprec.train.precision import autocast


class ContrastiveTask:
    """CLIP's objective in the configured precision.

    `model(images, tokens)` returns `image_features`, `text_features` and `logit_scale`; `loss_fn`
    takes them. Pixels are normalized on the device. With 16-bit parameters the loss is computed in
    float32: a scaled loss has no room in float16. `probe(batch)`, if there is one, measures the
    model's blocks (diagnostics.blocks).
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable, normalize: nn.Module, autocast_name: str
    ):
        self.model = model
        self.loss_fn = loss_fn
        self.normalize = normalize
        self.autocast_name = autocast_name
        self.probe: Callable | None = None
        self.dtype = next(p.dtype for p in model.parameters() if p.ndim >= 2)

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss and logit scale of a batch on the device, both 0-d."""
        with autocast(self.autocast_name, batch.images.device):
            pixels = self.normalize(batch.images).to(self.dtype)
            features = self.model(pixels, batch.tokens)
            if self.dtype != torch.float32:
                features = {name: value.float() for name, value in features.items()}
            loss = self.loss_fn(**features)
        return loss, features["logit_scale"].detach()
