"""CLIP models of open_clip, built from our schema with open_clip's parameter names kept."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lowprec.clip.torchvision_shim import open_clip
from lowprec.config.schema import PRESETS, ModelConfig

TEXT_HEAD_WIDTH = 64


class PatchDropout(nn.Module):
    """Keeps a random share of the patches of every image in training; the class token stays.

    `[batch, 1 + patches, width] -> [batch, 1 + kept, width]`; kept = max(1, int(patches (1 - p))).
    The same distribution as open_clip's, drawn on the tensor's device: open_clip draws on the CPU,
    which makes every step wait for a copy.

    With `batch_size` each forward gets a part of a whole batch of that size: of the share of rank
    `rank` of `num_ranks`, one micro-batch after the other. It drops what it would drop in the whole
    batch: the draw is the whole batch's and depends neither on the ranks nor on the micro-batches.
    Source: arXiv:2212.00794.
    """

    def __init__(
        self, probability: float, batch_size: int | None = None, rank: int = 0, num_ranks: int = 1
    ):
        super().__init__()
        self.probability, self.batch_size = probability, batch_size
        self.begin, self.end = (
            r * (batch_size or 0) // num_ranks for r in (rank, rank + 1)
        )  # this rank's images
        self.next = self.begin
        self.drawn: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Drops patches in training mode; the identity otherwise."""
        if not self.training:
            return x
        batch, tokens, width = x.shape
        num_kept = max(1, int((tokens - 1) * (1 - self.probability)))
        order = self._draw(batch, tokens - 1, x.device).topk(num_kept, dim=1).indices
        kept = x[:, 1:].gather(1, order[:, :, None].expand(-1, -1, width))
        return torch.cat((x[:, :1], kept), dim=1)

    def _draw(self, batch: int, patches: int, device: torch.device) -> Tensor:
        """One random number per image and patch: [batch, patches]."""
        if self.batch_size is None:
            return torch.rand(batch, patches, device=device)
        if self.next == self.begin:
            self.drawn = torch.rand(self.batch_size, patches, device=device)
        rows = self.drawn[self.next : self.next + batch]
        self.next = self.begin if self.next + batch == self.end else self.next + batch
        return rows


def build_model(config: ModelConfig, intervention: str = "none") -> nn.Module:
    """A freshly initialized model; `model(images, tokens)` gives a dict of features and scale.

    images: float [batch, 3, image_size, image_size], normalized; tokens: int64 [batch,
    context_length]. `image_features` and `text_features` are [batch, embed_dim] of norm 1,
    `logit_scale` is 0-d. `intervention`: "none", "zero_init" (layer-scale 0.0 on both sublayers of
    every block of both towers) or "kq_norm" (layer norm of keys and queries).
    """
    changes = {
        "none": {},
        "zero_init": {"ls_init_value": 0.0},
        "kq_norm": {"qk_norm": True},
    }[intervention]
    build = _build_preset if config.name in PRESETS else _build_open_clip
    model = build(config, changes)
    if config.patch_dropout:
        model.visual.patch_dropout = PatchDropout(config.patch_dropout)
    return model


def _build_preset(config: ModelConfig, changes: dict) -> nn.Module:
    return open_clip.model.CLIP(
        embed_dim=config.embed_dim,
        vision_cfg={
            "image_size": config.image_size,
            "patch_size": config.patch_size,
            "width": config.vision_width,
            "layers": config.vision_layers,
            "head_width": config.heads,
            **changes,
        },
        text_cfg={
            "context_length": config.context_length,
            "vocab_size": config.vocab_size,
            "width": config.text_width,
            "layers": config.text_layers,
            "heads": config.text_width // TEXT_HEAD_WIDTH,
            **changes,
        },
        output_dict=True,
    )


def _build_open_clip(config: ModelConfig, changes: dict) -> nn.Module:
    sizes = copy.deepcopy(open_clip.get_model_config(config.name))
    sizes["vision_cfg"].update(changes)
    sizes["text_cfg"].update(changes)
    for name in ("image_size", "patch_size"):
        if getattr(config, name) is not None:
            sizes["vision_cfg"][name] = getattr(config, name)
    for name in ("context_length", "vocab_size"):
        if getattr(config, name) is not None:
            sizes["text_cfg"][name] = getattr(config, name)
    if config.embed_dim is not None:
        sizes["embed_dim"] = config.embed_dim
    towers = {name: sizes[name] for name in ("embed_dim", "vision_cfg", "text_cfg")}
    return open_clip.create_model(
        config.name, load_weights=False, pretrained_text=False, output_dict=True, **towers
    )


def blocks(model: nn.Module) -> list[nn.Module]:
    """The residual attention blocks of open_clip's own towers, vision first; of others none."""
    return [block for tower in _transformers(model) for block in tower.resblocks]


def _transformers(model: nn.Module) -> list[nn.Module]:
    towers = (model.visual, getattr(model, "text", model))
    found = (getattr(tower, "transformer", None) for tower in towers)
    return [transformer for transformer in found if hasattr(transformer, "resblocks")]


def compile_blocks(model: nn.Module) -> None:
    """torch.compile of every block, in place; parameter names stay.

    Where open_clip's checkpointing is on, the blocks take it over: between forward and backward a
    block keeps its input and what attention gave, and computes the rest again in its compiled
    backward, less what no gradient needs, such as its last product. It cannot be turned off later:
    `set_grad_checkpointing(False)` comes before.
    """
    for transformer in _transformers(model):
        for block in transformer.resblocks:
            taken = getattr(block.forward, "func", None) is _checkpointed  # by an earlier call
            if transformer.grad_checkpointing and not taken:
                block.forward = partial(_checkpointed, block.forward)
            block.compile(dynamic=False)
        transformer.grad_checkpointing = False


# Attention's kernels: dear, small results, and random under dropout, so that a graph which computes
# them again would have to set the generator back.
_KEPT = [
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


def _checkpointed(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    keep = partial(create_selective_checkpoint_contexts, _KEPT)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=keep, **kwargs)


def image_size(model: nn.Module) -> int:
    """Pixels a side of the images that the model takes."""
    size = model.visual.image_size
    return size[0] if isinstance(size, (tuple, list)) else size


def contrastive_loss(rank: int = 0, world_size: int = 1, local_loss: bool = False) -> nn.Module:
    """open_clip's symmetric cross entropy over the batch: `loss(**model(images, tokens))`, 0-d.

    In several processes features are gathered with their gradients; `local_loss`: each rank
    computes its own rows of the loss, not all of them.
    """
    return open_clip.loss.ClipLoss(
        local_loss=local_loss, gather_with_grad=True, rank=rank, world_size=world_size
    )


class Normalize(nn.Module):
    """uint8 [batch, 3, height, width] -> float32 alike, by CLIP's mean and deviation."""

    def __init__(self):
        super().__init__()
        mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
        self.register_buffer("mean", torch.tensor(mean)[:, None, None] * 255)
        self.register_buffer("std", torch.tensor(std)[:, None, None] * 255)

    def forward(self, images: Tensor) -> Tensor:
        """Normalizes on the images' device, which must be the module's."""
        return (images.float() - self.mean) / self.std
