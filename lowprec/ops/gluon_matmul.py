"""Gluon kernel for `reference.matmul` on Hopper: int8 or fp8 products with fused scales and bias.

One program per multiprocessor loops over output tiles, or over parts of their sums. A producer warp
loads operands by TMA into a ring of stages; each of two warpgroups multiplies half the rows of a
tile. While one warpgroup scales, rounds and stores its rows, the other can multiply, and the
producer loads ahead. Rows of the operands and the output must be multiples of 16 bytes.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from lowprec.ops.epilogue import gluon_finish, gluon_load_bias, gluon_load_scales
from lowprec.ops.launch import Launch
from lowprec.ops.triton_quantize import num_sms

HALF_M = gl.constexpr(64)  # rows of a tile that a warpgroup multiplies
BLOCK_M = gl.constexpr(128)
BLOCK_N = gl.constexpr(256)
BLOCK_K = gl.constexpr(128)
STAGES = gl.constexpr(4)
GROUP_M = gl.constexpr(8)  # rows of output tiles that reuse cached columns of b
HOPPER_TILE = {"BLOCK_M": BLOCK_M.value, "BLOCK_N": BLOCK_N.value, "BLOCK_K": BLOCK_K.value}
STORED_BYTES = 256  # of a tile's row at a time: shared memory has no room for all


@gluon.jit
def _count(M, N, K, K_PART):
    """Number of tiles, times that of parts of the sum."""
    return gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N) * gl.cdiv(K, K_PART)


@gluon.jit
def _tile_at(number, M, N, K, K_PART):
    """First row and column of a tile, then the part of the sum, its first and last term.

    Tiles of a part are in an order that covers GROUP_M rows of tiles at a time.
    """
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    part, number = number // (tiles_m * tiles_n), number % (tiles_m * tiles_n)
    group = number // (GROUP_M * tiles_n)
    first = group * GROUP_M
    rows = gl.minimum(tiles_m - first, GROUP_M)
    within = number % (GROUP_M * tiles_n)
    m0, n0 = (first + within % rows) * BLOCK_M, within // rows * BLOCK_N
    return m0, n0, part, part * K_PART, gl.minimum((part + 1) * K_PART, K)


@gluon.jit
def _load_tiles(a_desc, b_desc, ring, M, N, K, K_PART):
    """Fills stages of the ring as the warpgroups empty them."""
    a_ring, b_ring, full, empty = ring
    step = 0
    for number in range(gl.program_id(0), _count(M, N, K, K_PART), gl.num_programs(0)):
        m0, n0, part, first, last = _tile_at(number, M, N, K, K_PART)
        for k in range(first, last, BLOCK_K):
            stage = step % STAGES
            # A barrier's phase flips each time the ring has gone round. Waiting for the opposite of
            # the readers' phase returns at once in the first round, when all stages are empty.
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(a_desc, [m0, k], loaded, a_ring.index(stage))
            tma.async_copy_global_to_shared(b_desc, [n0, k], loaded, b_ring.index(stage))
            step += 1


@gluon.jit
def _multiply_tiles(
    HALF: gl.constexpr, ring, output, factors, M, N, K, K_PART,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Multiplies the first (HALF = 0) or last (HALF = 1) rows of tiles, scales and stores them."""
    a_ring, b_ring, full, empty = ring
    out_desc, out_buffers = output
    a_scale_ptr, b_scale_ptr, bias_ptr = factors
    IS_INT: gl.constexpr = a_ring.dtype == gl.int8
    WIDTH: gl.constexpr = 128 if IS_INT else 256  # Triton has no wider instruction for int8
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    step = 0
    for number in range(gl.program_id(0), _count(M, N, K, K_PART), gl.num_programs(0)):
        m0, n0, part, first, last = _tile_at(number, M, N, K, K_PART)
        m0 += HALF * HALF_M
        sums = gl.zeros([HALF_M, BLOCK_N], gl.int32 if IS_INT else gl.float32, layout)
        for k in range(first, last, BLOCK_K):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            a = a_ring.index(stage).slice(HALF * HALF_M, HALF_M)
            b = b_ring.index(stage).permute((1, 0))
            sums = warpgroup_mma(a, b, sums, use_acc=k > first, is_async=True)
            # One product may be under way. The one before it has then read its stage, which goes
            # back to the producer; the first product of a tile has none before it.
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > first)
            step += 1
        m = m0 + gl.arange(0, HALF_M, gl.SliceLayout(1, layout))
        n = n0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        # Loaded before the last product is complete, to hide the latency.
        a_scale, b_scale = gluon_load_scales(a_scale_ptr, b_scale_ptr, m, n, M, N, A_ROWS, B_ROWS)
        bias = gluon_load_bias(bias_ptr, n, N, BIAS)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        finished = gluon_finish(sums, a_scale, b_scale, bias, BIAS)
        row = part * gl.cdiv(M, BLOCK_M) * BLOCK_M + m0  # whole tiles, which TMA stores
        _store(finished, row, n0, out_desc, out_buffers.index(HALF))
    tma.store_wait(0)


@gluon.jit
def _store(output, m0, n0, out_desc, buffer):
    """Rounds and stores `output`, as many columns at a time as fit in the buffer."""
    if output.shape[1] > buffer.shape[1]:
        HALF_N: gl.constexpr = output.shape[1] // 2
        # Each thread holds pairs of columns from all over the row, so that cutting it into halves
        # moves no number between threads.
        halves = gl.permute(gl.reshape(output, [output.shape[0], 2, HALF_N]), [0, 2, 1])
        left, right = gl.split(halves)
        _store(left, m0, n0, out_desc, buffer)
        _store(right, m0, n0 + HALF_N, out_desc, buffer)
    else:
        # The earlier store must have read the buffer, and the fence shows these writes, made by
        # threads, to the copy engine.
        tma.store_wait(0)
        buffer.store(output.to(out_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [m0, n0], buffer)


@gluon.jit
def _matmul_hopper_kernel(
    a_desc, b_desc, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr, M, N, K, K_PART,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    buffers: gl.constexpr = [2, HALF_M, out_desc.block_shape[1]]
    out_buffers = gl.allocate_shared_memory(out_desc.dtype, buffers, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # of two warpgroups
    fence_async_shared()
    ring = (a_ring, b_ring, full, empty)
    output = (out_desc, out_buffers)
    factors = (a_scale_ptr, b_scale_ptr, bias_ptr)
    gl.warp_specialize(
        [
            (_multiply_tiles, (0, ring, output, factors, M, N, K, K_PART, A_ROWS, B_ROWS, BIAS)),
            (_multiply_tiles, (1, ring, output, factors, M, N, K, K_PART, A_ROWS, B_ROWS, BIAS)),
            (_load_tiles, (a_desc, b_desc, ring, M, N, K, K_PART)),
        ],
        [4, 1],  # warps of the last two functions; the first runs in the kernel's own warps
        [232, 40],  # registers per thread of these two; the first gets the rest, also 232
    )


def plan_hopper(
    device: torch.device, out_dtype: torch.dtype, sizes: tuple, tiles: int, **constants
) -> Launch:
    """The launch for M, N, K and terms in a part; all rows must be multiples of 16 bytes.

    `tiles` is the number of output tiles, times that of parts.
    """
    blocks = (
        [BLOCK_M.value, BLOCK_K.value],
        [BLOCK_N.value, BLOCK_K.value],
        [HALF_M.value, STORED_BYTES // out_dtype.itemsize],
    )
    grid = (min(num_sms(device), tiles),)
    return Launch(_matmul_hopper_kernel, grid, sizes, blocks, **constants, num_warps=4)
