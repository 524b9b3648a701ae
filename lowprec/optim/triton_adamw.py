"""Triton kernels of the optimizer: one launch for all tensors of a model.

A table on the device holds the addresses of each tensor's parameter, gradient, moments and
compensation. A program takes one chunk of one tensor and stores partial sums, which
`_reduce_kernel` adds in a fixed order, so that steps are bitwise reproducible. `adamw_update`
defines the numbers, `fused` launches the kernels.
"""

import triton
import triton.language as tl

from lowprec.optim import eight_bit
from lowprec.optim.eight_bit import decoded, encoded

# rows of the table of addresses: `adamw_update.Tensors` and, with 8-bit moments, code books
P, G, V, U, C, V_SCALES, U_SCALES, BOOKS = (tl.constexpr(i) for i in range(8))
BLOCK, BOOK_SIZE = tl.constexpr(eight_bit.BLOCK), tl.constexpr(eight_bit.SIZE)


@triton.jit
def _pointers(
    addresses_ptr, row, tensor, N, start, offsets, TYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    # The compiler knows nothing of an address from a table. That it is a multiple of 16 bytes lets
    # it load 16 bytes at once.
    first = tl.load(addresses_ptr + row * N + tensor).to(tl.pointer_type(TYPE)) + start
    if ALIGNED:
        first = tl.multiple_of(first, 16)
    return first + offsets


@triton.jit
def _load(pointers, mask, WHOLE: tl.constexpr):
    """Loads float32; without a mask for a whole chunk, so that loads are vectorized."""
    if WHOLE:
        return tl.load(pointers).to(tl.float32)
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointers, values, mask, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def _gradients_chunk(
    addresses_ptr, factor_ptr, parts_ptr, tensor, start, left, N,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, CHUNK)
    mask = offsets < left
    g_ptr = _pointers(addresses_ptr, G, tensor, N, start, offsets, TYPE, ALIGNED)
    g = _load(g_ptr, mask, WHOLE) * tl.load(factor_ptr)
    magnitude = tl.abs(g)
    tl.store(parts_ptr, tl.sum(g * g))
    tl.store(parts_ptr + 1, tl.sum((magnitude == float("inf")).to(tl.float32)))
    tl.store(parts_ptr + 2, tl.sum((g != g).to(tl.float32)))
    tl.store(parts_ptr + 3, tl.max(tl.where(mask & (g == g), magnitude, float("-inf"))))


@triton.jit
def _gradients_kernel(
    addresses_ptr, sizes_ptr, chunk_tensors_ptr, chunk_starts_ptr, factor_ptr, parts_ptr, N,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tensor = tl.load(chunk_tensors_ptr + tl.program_id(0))
    start = tl.load(chunk_starts_ptr + tl.program_id(0))
    left = tl.minimum(tl.load(sizes_ptr + tensor) - start, CHUNK).to(tl.int32)
    parts = parts_ptr + 4 * tl.program_id(0)
    # Compiled twice, because masks prevent vectorized loads; only a tensor's last chunk needs them.
    if left == CHUNK:
        _gradients_chunk(
            addresses_ptr, factor_ptr, parts, tensor, start, left, N, TYPE, ALIGNED, CHUNK, True
        )
    else:
        _gradients_chunk(
            addresses_ptr, factor_ptr, parts, tensor, start, left, N, TYPE, ALIGNED, CHUNK, False
        )


@triton.jit
def _moments_chunk(
    addresses_ptr, values_ptr, parts_ptr, tensor, start, left, N,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    offsets = tl.arange(0, CHUNK)
    mask = offsets < left
    at = values_ptr + 4 * tensor
    lr, eps, debias_v, debias_u = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    g_ptr = _pointers(addresses_ptr, G, tensor, N, start, offsets, TYPE, ALIGNED)
    v_ptr = _pointers(addresses_ptr, V, tensor, N, start, offsets, tl.float32, ALIGNED)
    u_ptr = _pointers(addresses_ptr, U, tensor, N, start, offsets, tl.float32, ALIGNED)
    g, v, u = _load(g_ptr, mask, WHOLE), _load(v_ptr, mask, WHOLE), _load(u_ptr, mask, WHOLE)
    root_u = tl.sqrt_rn(u * debias_u)
    ratio = g / tl.maximum(root_u, eps)
    update = lr * debias_v * v / (root_u + eps)
    if not WHOLE:  # 0 / 0 where eps is 0
        ratio, update = tl.where(mask, ratio, 0.0), tl.where(mask, update, 0.0)
    tl.store(parts_ptr, tl.sum(g * g))
    tl.store(parts_ptr + 1, tl.sum(ratio * ratio))
    tl.store(parts_ptr + 2, tl.sum(update * update))


@triton.jit
def _moments_kernel(
    addresses_ptr, sizes_ptr, chunk_tensors_ptr, chunk_starts_ptr, values_ptr, parts_ptr, N,
    TYPE: tl.constexpr, ALIGNED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tensor = tl.load(chunk_tensors_ptr + tl.program_id(0))
    start = tl.load(chunk_starts_ptr + tl.program_id(0))
    left = tl.minimum(tl.load(sizes_ptr + tensor) - start, CHUNK).to(tl.int32)
    parts = parts_ptr + 3 * tl.program_id(0)
    if left == CHUNK:
        _moments_chunk(
            addresses_ptr, values_ptr, parts, tensor, start, left, N, TYPE, ALIGNED, CHUNK, True
        )
    else:
        _moments_chunk(
            addresses_ptr, values_ptr, parts, tensor, start, left, N, TYPE, ALIGNED, CHUNK, False
        )


@triton.jit
def _pointers_8bit(
    addresses_ptr, row, tensor, N, start, offsets, SIGNED: tl.constexpr, ALIGNED: tl.constexpr
):
    """Pointers to a chunk's codes, to its first scale and to the code book."""
    codes_ptr = _pointers(addresses_ptr, row, tensor, N, start, offsets, tl.uint8, ALIGNED)
    scales_row = row + (V_SCALES - V)
    scales_ptr = tl.load(addresses_ptr + scales_row * N + tensor).to(tl.pointer_type(tl.float32))
    book_ptr = tl.load(addresses_ptr + BOOKS * N + tensor).to(tl.pointer_type(tl.float32))
    return codes_ptr, scales_ptr + start // BLOCK, book_ptr + BOOK_SIZE * SIGNED


@triton.jit
def _store_8bit(
    codes_ptr, scales_ptr, book_ptr, x, left,
    SIGNED: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    codes, scales = encoded(x, book_ptr, SIGNED, CHUNK)
    offsets, blocks = tl.arange(0, CHUNK), tl.arange(0, CHUNK // BLOCK)
    _store(codes_ptr, codes, offsets < left, WHOLE)
    _store(scales_ptr + blocks, scales, blocks * BLOCK < left, WHOLE)


@triton.jit
def _step_chunk(
    addresses_ptr, coefficients_ptr, parts_ptr, tensor, start, left, N,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, ALIGNED: tl.constexpr, MOMENTS: tl.constexpr,
    UPDATE: tl.constexpr, EIGHT_BIT: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    at = coefficients_ptr + 7 * tensor
    apply, eps = tl.load(at) > 0, tl.load(at + 4)
    offsets = tl.arange(0, CHUNK)
    mask = offsets < left
    if EIGHT_BIT:
        at_v = _pointers_8bit(addresses_ptr, V, tensor, N, start, offsets, True, ALIGNED)
        at_u = _pointers_8bit(addresses_ptr, U, tensor, N, start, offsets, False, ALIGNED)
        v = decoded(_load(at_v[0], mask, WHOLE), at_v[1], at_v[2], offsets, mask)
        u = decoded(_load(at_u[0], mask, WHOLE), at_u[1], at_u[2], offsets, mask)
    else:
        v_ptr = _pointers(addresses_ptr, V, tensor, N, start, offsets, tl.float32, ALIGNED)
        u_ptr = _pointers(addresses_ptr, U, tensor, N, start, offsets, tl.float32, ALIGNED)
        v, u = _load(v_ptr, mask, WHOLE), _load(u_ptr, mask, WHOLE)
    if MOMENTS:
        factor, beta1, beta2 = tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        g_ptr = _pointers(addresses_ptr, G, tensor, N, start, offsets, G_TYPE, ALIGNED)
        g = tl.where(apply, _load(g_ptr, mask, WHOLE) * factor, 0.0)
        v = beta1 * v + (1 - beta1) * g
        u = beta2 * u + (1 - beta2) * g * g
        if not EIGHT_BIT:
            _store(v_ptr, v, mask, WHOLE)
            _store(u_ptr, u, mask, WHOLE)
        elif UPDATE:
            if apply:
                tl.debug_barrier()  # other threads have read what this one overwrites
                _store_8bit(at_v[0], at_v[1], at_v[2], v, left, True, CHUNK, WHOLE)
                _store_8bit(at_u[0], at_u[1], at_u[2], u, left, False, CHUNK, WHOLE)
        ratio = g / tl.maximum(tl.sqrt_rn(u), eps)
        tl.store(parts_ptr, tl.sum(ratio * ratio))
        tl.store(parts_ptr + 1, tl.sum(u))
        maxima_ptr = parts_ptr + 2 + 2 * UPDATE
        tl.store(maxima_ptr, tl.max(tl.where(mask, -u, float("-inf"))))
        tl.store(maxima_ptr + 1, tl.max(tl.where(mask, u, float("-inf"))))
    if UPDATE:
        rate, decay = tl.load(at + 5), tl.load(at + 6)
        p_ptr = _pointers(addresses_ptr, P, tensor, N, start, offsets, P_TYPE, ALIGNED)
        p = _load(p_ptr, mask, WHOLE)
        change = rate * v / (tl.sqrt_rn(u) + eps)
        if P_TYPE == tl.float32:
            new = decay * p - change
        else:  # Kahan summation: see adamw_update.add_compensated_
            c_ptr = _pointers(addresses_ptr, C, tensor, N, start, offsets, P_TYPE, ALIGNED)
            lost = _load(c_ptr, mask, WHOLE)
            total = (decay - 1) * p - change + lost
            new = tl.where(apply, (p + total).to(P_TYPE).to(tl.float32), p)
            lost = tl.where(apply, total - (new - p), lost)
            _store(c_ptr, lost.to(P_TYPE), mask, WHOLE)
        _store(p_ptr, new.to(P_TYPE), mask, WHOLE)
        tl.store(parts_ptr + 2 * MOMENTS, tl.sum(change * change))
        tl.store(parts_ptr + 2 * MOMENTS + 1, tl.sum(new * new))


@triton.jit
def _step_kernel(
    addresses_ptr, sizes_ptr, chunk_tensors_ptr, chunk_starts_ptr, coefficients_ptr, parts_ptr, N,
    P_TYPE: tl.constexpr, G_TYPE: tl.constexpr, ALIGNED: tl.constexpr, MOMENTS: tl.constexpr,
    UPDATE: tl.constexpr, EIGHT_BIT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tensor = tl.load(chunk_tensors_ptr + tl.program_id(0))
    start = tl.load(chunk_starts_ptr + tl.program_id(0))
    left = tl.minimum(tl.load(sizes_ptr + tensor) - start, CHUNK).to(tl.int32)
    parts = parts_ptr + (4 * MOMENTS + 2 * UPDATE) * tl.program_id(0)
    if left == CHUNK:
        _step_chunk(
            addresses_ptr, coefficients_ptr, parts, tensor, start, left, N,
            P_TYPE, G_TYPE, ALIGNED, MOMENTS, UPDATE, EIGHT_BIT, CHUNK, True,
        )  # fmt: skip
    else:
        _step_chunk(
            addresses_ptr, coefficients_ptr, parts, tensor, start, left, N,
            P_TYPE, G_TYPE, ALIGNED, MOMENTS, UPDATE, EIGHT_BIT, CHUNK, False,
        )  # fmt: skip


@triton.jit
def _reduce_kernel(
    parts_ptr, firsts_ptr, totals_ptr, WIDTH: tl.constexpr, SUMS: tl.constexpr, ROWS: tl.constexpr
):
    """Totals over a tensor's chunks: sums of the first SUMS columns, maxima of the others."""
    tensor, column = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(firsts_ptr + tensor), tl.load(firsts_ptr + tensor + 1)
    is_sum = column < SUMS
    nothing = tl.where(is_sum, 0.0, float("-inf"))
    # Each lane adds every ROWS-th chunk, and the lanes are added as a tree: the order, and with it
    # the rounding, depends on the number of chunks alone.
    total = tl.zeros([ROWS], tl.float32) + nothing
    for start in range(first, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        part = tl.load(parts_ptr + rows * WIDTH + column, mask=rows < end, other=0.0)
        part = tl.where(rows < end, part, nothing)
        total = tl.where(is_sum, total + part, tl.maximum(total, part))
    result = tl.where(is_sum, tl.sum(total), tl.max(total))
    tl.store(totals_ptr + tensor * WIDTH + column, result)
