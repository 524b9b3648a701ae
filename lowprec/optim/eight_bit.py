"""8-bit moments: codes with one scale for each 256 elements, 2.03 bytes per parameter for both.

A block is divided by its largest absolute value. Codes stand for 256 levels, closer to each other
near 0; the first moment's are signed, the second's are not. The scale takes up Adam's bias
correction: the codes of debiased moments are those of biased ones. Blocks of 256, as in torchao and
bitsandbytes, separate large elements from small ones better than the 2,048 of the paper, for 0.03
bytes per parameter. The code book and rounding are torchao's.

`quantize_` and `dequantize` are the definition; `encoded` and `decoded` do the same in a kernel.
Source: arXiv:2110.02861; levels: arXiv:1511.04561.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
TINY = 2.0**-126  # least scale
BOUNDS, SIZE = 257, 514  # a code book: levels, then bounds
_BLOCK, _TINY, _BOUNDS = (tl.constexpr(x) for x in (BLOCK, TINY, BOUNDS))


def dequantize(codes: Tensor, scales: Tensor, is_signed: bool) -> Tensor:
    """float32 in the shape of `codes`."""
    levels = code_books(codes.device)[int(is_signed), :BOUNDS]
    values = levels[codes.flatten().int()] * scales.repeat_interleave(BLOCK)[: codes.numel()]
    return values.view(codes.shape)


def quantize_(codes: Tensor, scales: Tensor, is_signed: bool, x: Tensor, apply: Tensor) -> None:
    """Writes codes, uint8 in the shape of x, and scales, float32 [blocks], where `apply` is 1.

    The blocks are of consecutive elements; the last one may be shorter.
    """
    blocks = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    amax = blocks.abs().amax(dim=1).clamp(min=TINY)
    bounds = code_books(x.device)[int(is_signed), BOUNDS + 1 : SIZE - 1]
    nearest = torch.bucketize(blocks / amax[:, None], bounds, right=True)
    nearest = nearest.flatten()[: x.numel()].view(x.shape).to(torch.uint8)
    codes.copy_(torch.where(apply > 0, nearest, codes))
    scales.copy_(torch.where(apply > 0, amax, scales))


@cache
def code_books(device: torch.device) -> Tensor:
    """float32 [2, 514]: a code book for unsigned and one for signed numbers.

    Code c stands for the level c of 256 (one more is unused). Numbers from bound c up to the bound
    c + 1 of 257 have it; the first bound is -inf, the last inf.
    """
    books = torch.zeros(2, SIZE, dtype=torch.float32)
    for book, is_signed in zip(books, (False, True), strict=True):
        levels = book[:256].copy_(_levels(is_signed))
        book[BOUNDS], book[-1] = -torch.inf, torch.inf
        book[BOUNDS + 1 : SIZE - 1] = _midpoints(levels)
    return books.to(device)


def _levels(is_signed: bool) -> Tensor:
    """Sorted: 0, 1 and, between 10^-7 and 1, the middles of equal cells, more in each decade."""
    parts = [torch.tensor([0.0, 1.0], dtype=torch.float32)]
    for decade in range(7):
        cells = 2 ** (decade if is_signed else decade + 1)
        edges = torch.linspace(0.1, 1, cells + 1, dtype=torch.float32)
        middles = 10 ** (decade - 6) * ((edges[:-1] + edges[1:]) / 2)
        parts += [middles, -middles] if is_signed else [middles]
    return torch.cat(parts).sort().values


def _midpoints(levels: Tensor) -> Tensor:
    """Least float32 numbers x that are rounded up: x - low >= (high - low) / 2 in float32."""
    low, half = levels[:-1], (levels[1:] - levels[:-1]) * 0.5
    near = [low + half]
    for _ in range(2):
        near = [near[0].nextafter(low), *near, near[-1].nextafter(levels[1:])]
    bounds = near[-1]
    for x in reversed(near[:-1]):
        bounds = torch.where(x - low >= half, x, bounds)
    return bounds


@triton.jit
def decoded(codes, scales_ptr, book_ptr, offsets, mask):
    """See `dequantize`: the elements at `offsets` in a tensor, 0 where the mask is false."""
    scales = tl.load(scales_ptr + offsets // _BLOCK, mask=mask, other=0.0)
    return tl.load(book_ptr + codes.to(tl.int32)) * scales


@triton.jit
def encoded(x, book_ptr, SIGNED: tl.constexpr, CHUNK: tl.constexpr):
    """See `quantize_`: codes [CHUNK] and scales [CHUNK / 256].

    The spacing of the levels gives a code that is right or one off, which two bounds tell.
    """
    blocks: tl.constexpr = CHUNK // _BLOCK
    amax = tl.max(tl.reshape(tl.abs(x), (blocks, _BLOCK)), axis=1)
    amax = tl.maximum(amax, _TINY)
    x = tl.div_rn(x, tl.reshape(tl.broadcast_to(amax[:, None], (blocks, _BLOCK)), (CHUNK,)))
    magnitude = tl.maximum(tl.abs(x), 1e-7)
    decade = tl.minimum(tl.maximum(tl.floor(tl.log2(magnitude) * 0.30103), -7.0), -1.0)
    cells = tl.exp2(decade + (7 if SIGNED else 8))
    within = (magnitude * tl.exp2((decade + 1) * -3.3219281) - 0.1) / 0.9
    code = tl.floor(cells * (1 + within)).to(tl.int32)
    if SIGNED:
        code = tl.maximum(127 + tl.where(x < 0, -code, code), 0)
    else:
        code = tl.maximum(code - 1, 0)
    code = tl.minimum(code, 255)
    bound_ptr = book_ptr + _BOUNDS + code
    code += (x >= tl.load(bound_ptr + 1)).to(tl.int32) - (x < tl.load(bound_ptr)).to(tl.int32)
    return code.to(tl.uint8), amax
