"""From a batch to its loss and gradients."""

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lowprec.data.loader import Batch
from lowprec.train.distributed import ONE_PROCESS, Ranks
from lowprec.train.precision import autocast


class ContrastiveTask:
    """CLIP's objective in the configured precision.

    `model(images, tokens)` returns `image_features`, `text_features` and `logit_scale`; `loss_fn`
    takes them. Pixels are normalized on the device. With 16-bit parameters the loss is computed in
    float32: a scaled loss has no room in float16. `probe(batch)`, if there is one, measures the
    model's blocks (diagnostics.blocks).

    In several processes a batch is the rank's part of it, `loss_fn` gathers features over ranks,
    and `parallel` is the model that averages gradients over them (default: the model). With
    `accumulate` parts features are cached: all parts forward without gradients, the loss of the
    whole batch, its gradient by features, then part by part forward again and backward.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable,
        normalize: nn.Module,
        autocast_name: str,
        *,
        parallel: nn.Module | None = None,
        world: Ranks = ONE_PROCESS,
        accumulate: int = 1,
    ):
        self.model = model
        self.parallel = model if parallel is None else parallel
        self.loss_fn = loss_fn
        self.normalize = normalize
        self.autocast_name = autocast_name
        self.world = world
        self.accumulate = accumulate
        self.probe: Callable | None = None
        self.dtype = next(p.dtype for p in model.parameters() if p.ndim >= 2)

    def features(self, batch: Batch, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Features and logit scale of a batch on the device, under `autocast`."""
        pixels = self.normalize(batch.images).to(self.dtype)
        features = (model or self.model)(pixels, batch.tokens)
        if self.dtype != torch.float32:
            features = {name: value.float() for name, value in features.items()}
        return features

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Loss and logit scale of a batch on the device, both 0-d."""
        with self.autocast(batch):
            features = self.features(batch, self.parallel)
            loss = self.loss_fn(**features)
        return loss, features["logit_scale"].detach()

    def measure(self, batch: Batch) -> None:
        """Runs the model alone, without loss, as `probe` wants it."""
        with self.autocast(batch):
            self.features(batch)

    def backward(self, batch: Batch, scale: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Leaves the gradients of `scale(loss)`; returns the loss of all ranks and logit scale."""
        if self.accumulate > 1:
            loss, logit_scale = self._cached_backward(batch, scale)
        else:
            loss, logit_scale = self.loss(batch)
            scale(loss).backward()
        if isinstance(self.model, FSDPModule):
            own = self.model.logit_scale
            own.grad = self.world.mean(own.grad)
        return self.world.mean(loss.detach()), logit_scale

    def autocast(self, batch: Batch) -> contextlib.AbstractContextManager:
        """The dtype that the batch is computed in."""
        return autocast(self.autocast_name, batch.images.device)

    def _cached_backward(self, batch: Batch, scale: Callable) -> tuple[Tensor, Tensor]:
        """The gradients of the whole batch with the memory of one part of it.

        The second forward of a part gets the random state of its first.
        Source: arXiv:2101.06983.
        """
        parts, states, found = _split(batch, self.accumulate), [], []
        for part in parts:
            states.append(_random_state(part.images.device))
            with torch.no_grad(), self.autocast(batch):
                found.append(self.features(part))
        after = _random_state(batch.images.device)
        leaves = {
            name: torch.cat([f[name] for f in found]) if value.ndim else value.clone()
            for name, value in found[0].items()
        }
        leaves = {name: value.requires_grad_() for name, value in leaves.items()}
        with self.autocast(batch):
            loss = self.loss_fn(**leaves)
        scale(loss).backward()
        begin = 0
        for part, state in zip(parts, states, strict=True):
            last, end = part is parts[-1], begin + len(part.tokens)
            _set_random_state(state, batch.images.device)
            with self.synchronizing(last):
                with self.autocast(batch):
                    features = self.features(part, self.parallel)
                # of the one logit scale the last part has the whole gradient
                given = {
                    name: leaf.grad[begin:end] if leaf.ndim else leaf.grad * last
                    for name, leaf in leaves.items()
                }
                torch.autograd.backward([features[name] for name in given], list(given.values()))
            begin = end
        _set_random_state(after, batch.images.device)
        return loss, leaves["logit_scale"].detach()

    def synchronizing(self, yes: bool) -> contextlib.AbstractContextManager:
        """Whether this backward averages gradients over ranks: only the last part's need."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(yes)
        if yes or not isinstance(self.parallel, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.parallel.no_sync()


def _split(batch: Batch, count: int) -> list[Batch]:
    parts = [tensor.chunk(count) for tensor in (batch.images, batch.tokens)]
    return [
        Batch(images, tokens, batch.labels, batch.samples)
        for images, tokens in zip(*parts, strict=True)
    ]


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
