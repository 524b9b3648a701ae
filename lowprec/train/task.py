"""Computes the loss of a batch and its gradients."""

import contextlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from lowprec.data.loader import Batch
from lowprec.train.distributed import ONE_PROCESS, Ranks

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(name: str, device: torch.device) -> contextlib.AbstractContextManager:
    """Returns torch.autocast for "bf16" and "fp16", else (fp32, pure_*) a null context."""
    if name in DTYPES:
        return torch.autocast(device.type, dtype=DTYPES[name])
    return contextlib.nullcontext()


@dataclass(eq=False)
class ContrastiveTask:
    """CLIP's objective in the configured precision.

    With 16-bit parameters the loss is computed in float32: a scaled loss overflows float16.

    With several processes a batch is this rank's share of it and `loss_fn` gathers features over
    ranks. With `accumulate` > 1 features are cached: all micro-batches run forward without
    gradients, the loss and its gradient with respect to the features are those of the whole batch,
    then each micro-batch runs forward again and backward. Source: arXiv:2101.06983.
    """

    model: nn.Module  # maps (images, tokens) to image_features, text_features and logit_scale
    loss_fn: Callable  # maps these three to a 0-d loss
    normalize: nn.Module  # maps uint8 images to pixels, on the device
    autocast_name: str  # precision.autocast
    _: KW_ONLY
    parallel: nn.Module | None = None  # averages gradients over ranks; by default the model
    world: Ranks = ONE_PROCESS
    accumulate: int = 1  # number of micro-batches
    probe: Callable | None = None  # measures the model's blocks (diagnostics.blocks)

    def __post_init__(self):
        self.parallel = self.model if self.parallel is None else self.parallel
        self.dtype = next(p.dtype for p in self.model.parameters() if p.ndim >= 2)

    def autocast(self, batch: Batch) -> contextlib.AbstractContextManager:
        """Returns the context that a batch is computed in."""
        return autocast(self.autocast_name, batch.images.device)

    def features(self, batch: Batch, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Returns features and logit scale of a batch on the device; call under `autocast`."""
        pixels = self.normalize(batch.images).to(self.dtype)
        features = (model or self.model)(pixels, batch.tokens)
        if self.dtype != torch.float32:
            features = {name: value.float() for name, value in features.items()}
        return features

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns loss and logit scale of a batch on the device, both 0-d."""
        with self.autocast(batch):
            features = self.features(batch, self.parallel)
            loss = self.loss_fn(**features)
        return loss, features["logit_scale"].detach()

    def measure(self, batch: Batch) -> None:
        """Runs the model without a loss, for `probe`."""
        with self.autocast(batch):
            self.features(batch)

    def backward(self, batch: Batch, scale: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Accumulates the gradients of `scale(loss)`.

        Returns the loss, averaged over ranks, and the logit scale, both 0-d and detached.
        """
        if self.accumulate > 1:
            loss, logit_scale = self._cached_backward(batch, scale)
        else:
            loss, logit_scale = self.loss(batch)
            scale(loss).backward()
        if isinstance(self.model, FSDPModule):
            parameter = self.model.logit_scale  # not sharded, so not averaged by FSDP2
            if parameter.requires_grad:
                parameter.grad = self.world.mean(parameter.grad)
        return self.world.mean(loss.detach()), logit_scale

    def _cached_backward(self, batch: Batch, scale: Callable) -> tuple[Tensor, Tensor]:
        """Computes the gradients of the whole batch with the memory of one micro-batch.

        The second forward pass of a micro-batch restores the random state of its first.
        """
        device = batch.images.device
        chunks = (tensor.chunk(self.accumulate) for tensor in (batch.images, batch.tokens))
        micro_batches = [
            Batch(images, tokens, batch.labels, batch.samples)
            for images, tokens in zip(*chunks, strict=True)
        ]
        states, cached = [], []
        for micro_batch in micro_batches:
            states.append(_random_state(device))
            with torch.no_grad(), self.autocast(batch):
                cached.append(self.features(micro_batch))
        state_after = _random_state(device)
        leaves = {
            name: torch.cat([f[name] for f in cached]) if value.ndim else value.clone()
            for name, value in cached[0].items()
        }
        leaves = {name: value.requires_grad_() for name, value in leaves.items()}
        with self.autocast(batch):
            loss = self.loss_fn(**leaves)
        scale(loss).backward()
        begin = 0
        for micro_batch, state in zip(micro_batches, states, strict=True):
            is_last, end = micro_batch is micro_batches[-1], begin + len(micro_batch.tokens)
            _set_random_state(state, device)
            if isinstance(self.model, FSDPModule):  # keeps what it gathered for the next one
                self.model.set_reshard_after_backward(is_last)
            with self.synchronizing(is_last):
                with self.autocast(batch):
                    features = self.features(micro_batch, self.parallel)
                _set_random_state(state_after, device)  # stochastic rounding draws in backward
                # the last micro-batch takes the whole gradient of the logit scale
                gradients = {
                    name: leaf.grad[begin:end] if leaf.ndim else leaf.grad * is_last
                    for name, leaf in leaves.items()
                    if features[name].requires_grad
                }
                outputs = [features[name] for name in gradients]
                torch.autograd.backward(outputs, list(gradients.values()))
                state_after = _random_state(device)
            begin = end
        return loss, leaves["logit_scale"].detach()

    def synchronizing(self, enabled: bool) -> contextlib.AbstractContextManager:
        """Sets whether backward passes in this context average gradients over ranks."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(enabled)
        if enabled or not isinstance(self.parallel, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.parallel.no_sync()


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_device


def _set_random_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
