"""open_clip's vision transformer with less work on a GPU before and after its blocks."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowprec.clip import open_clip

ALIGNMENT = 8  # features; rows of operands must be multiples of 16 bytes


def is_fast(x: Tensor) -> bool:
    """Whether towers take the fast path: only on a GPU, so that CPUs compute as open_clip does."""
    return x.is_cuda


class PatchDropout(nn.Module):
    """Keeps a random part of each image's patches in training, and always the class token.

    `[batch, 1 + patches, width] -> [batch, 1 + kept, width]`; kept = max(1, int(patches (1 - p))).
    Draws on the tensor's device; open_clip draws on the CPU, so that each step waits for a copy.
    Source: arXiv:2212.00794.

    With `batch_size`, that of the global batch, numbers are drawn for the whole batch, and
    consecutive forwards use the rows of this rank's consecutive micro-batches: the result depends
    on neither the number of ranks nor the micro-batches.
    """

    def __init__(
        self, probability: float, batch_size: int | None = None, rank: int = 0, num_ranks: int = 1
    ):
        super().__init__()
        self.probability, self.batch_size = probability, batch_size
        images = (batch_size or 0) // num_ranks
        self.begin, self.end = rank * images, (rank + 1) * images
        self.next, self.drawn = self.begin, None

    def forward(self, x: Tensor) -> Tensor:
        """Drops patches in training mode; returns x otherwise."""
        batch, tokens, width = x.shape
        kept = self.draw(batch, tokens - 1, x.device)
        if kept is None:
            return x
        patches = x[:, 1:].gather(1, kept[:, :, None].expand(-1, -1, width))
        return torch.cat((x[:, :1], patches), dim=1)

    def draw(self, batch: int, patches: int, device: torch.device) -> Tensor | None:
        """The patches to keep, int64 [batch, kept]; None in evaluation mode."""
        if not self.training:
            return None
        num_kept = max(1, int(patches * (1 - self.probability)))
        return self._random(batch, patches, device).topk(num_kept, dim=1).indices

    def _random(self, batch: int, patches: int, device: torch.device) -> Tensor:
        """One random number per image and patch: [batch, patches]."""
        if self.batch_size is None:
            return torch.rand(batch, patches, device=device)
        if self.next == self.begin:
            self.drawn = torch.rand(self.batch_size, patches, device=device)
        rows = self.drawn[self.next : self.next + batch]
        self.next = self.begin if self.next + batch == self.end else self.next + batch
        return rows


def embed(visual: nn.Module, images: Tensor, kept: Tensor | None) -> Tensor:
    """Embeds the class token and kept patches: [batch, 3, height, width] -> [batch, 1 + kept, d].

    Computes one matrix product. Each row of the input holds a patch's pixels and its one-hot
    position; the matrix holds the kernel of the convolution and the positional embeddings. The
    class token has no pixels; its embedding is added to the embedding of position 0.
    kept: int64 [batch, kept], or None for all.
    """
    kernel, positions = visual.conv1.weight.flatten(1), visual.positional_embedding
    positions = torch.cat((positions[:1] + visual.class_embedding, positions[1:]))
    padding = -(kernel.shape[1] + len(positions)) % ALIGNMENT
    matrix = F.pad(torch.cat((kernel, positions.T.to(kernel.dtype)), dim=1), (0, padding))
    height, width = visual.patch_size
    pixels = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))
    pixels = pixels.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    if kept is None:
        kept = torch.arange(pixels.shape[1], device=images.device).expand(len(images), -1)
    else:
        pixels = pixels.gather(1, kept[:, :, None].expand(-1, -1, pixels.shape[2]))
    position = F.pad(kept + 1, (1, 0))[:, :, None]
    columns = torch.arange(len(positions) + padding, device=images.device)
    rows = torch.cat((F.pad(pixels, (0, 0, 1, 0)), (position == columns).to(images.dtype)), dim=2)
    return visual.ln_pre(F.linear(rows, matrix))


class VisionTransformer(open_clip.transformer.VisionTransformer):
    """open_clip's VisionTransformer with a faster path on a GPU, equal up to rounding.

    `replace` converts open_clip's class to this one. On a GPU, patches are dropped before `embed`,
    which does not call `conv1`, and only pooled tokens are normalized: hooks on `conv1` do not run,
    and `ln_post` takes [batch, width].

    Attributes:
        is_embedding_compiled: whether `embed` runs under torch.compile.
    """

    is_embedding_compiled = False

    def _embeds(self, x: Tensor) -> Tensor:
        drops = isinstance(self.patch_dropout, PatchDropout)
        is_known = drops or isinstance(self.patch_dropout, nn.Identity)
        in_patches = [n * p for n, p in zip(self.grid_size, self.patch_size, strict=True)]
        if not (is_fast(x) and is_known and list(x.shape[2:]) == in_patches):
            return super()._embeds(x)
        patches = len(self.positional_embedding) - 1
        kept = self.patch_dropout.draw(len(x), patches, x.device) if drops else None
        return (_compiled_embed() if self.is_embedding_compiled else embed)(self, x, kept)

    def _pool(self, x: Tensor) -> tuple[Tensor, Tensor]:
        is_plain = self.attn_pool is None and self.pool_type == "tok" and not self.output_tokens
        if not is_fast(x) or not is_plain:
            return super()._pool(x)
        return self.ln_post(x[:, 0]), x[:, 1:]


def compile_embedding(visual: nn.Module) -> None:
    """Compiles `embed` of a `VisionTransformer`, in place; leaves other modules unchanged."""
    if isinstance(visual, VisionTransformer):
        visual.is_embedding_compiled = True


@functools.cache
def _compiled_embed() -> Callable:
    return torch.compile(embed, dynamic=False)


def replace(visual: nn.Module) -> None:
    """Converts open_clip's VisionTransformer to ours, in place; leaves other modules unchanged."""
    if type(visual) is open_clip.transformer.VisionTransformer:
        visual.__class__ = VisionTransformer
