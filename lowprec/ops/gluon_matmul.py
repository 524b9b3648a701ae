"""Gluon kernels for `reference.matmul` on Hopper: int8 or fp8 products with fused scales and bias.

One program per multiprocessor takes output tiles, or parts of their sums, until none is left. A
producer warp loads operands by TMA into a ring of stages; each of two warpgroups multiplies half
the rows of a tile. While one warpgroup scales, rounds and stores its rows, the other can multiply,
and the producer loads ahead. Rows of the operands and the output must be multiples of 16 bytes.
Scales may belong to tiles of 128 terms: then each warpgroup adds scaled products in float32.

Programs take numbers of tiles from a counter in global memory. With equal shares, programs that
start late, because NCCL's kernels hold some multiprocessors, would double the product's time.
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
from lowprec.ops.launch import Launch, num_sms

BLOCK_K = gl.constexpr(128)
HALF_N = gl.constexpr(128)  # columns multiplied at a time if scales are of tiles
STAGES = gl.constexpr(4)
GROUP_ROWS = gl.constexpr(1024)  # of the output, whose tiles reuse cached columns of b
WIDE_TILE = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": BLOCK_K.value}
TALL_TILE = {"BLOCK_M": 256, "BLOCK_N": 128, "BLOCK_K": BLOCK_K.value}
STORED_BYTES = 16384  # of half a tile at a time: shared memory has no room for all


@gluon.jit
def _count(ring, M, N, K, K_PART):
    """Number of tiles, times that of parts of the sum."""
    return gl.cdiv(M, ring[0].shape[1]) * gl.cdiv(N, ring[1].shape[1]) * gl.cdiv(K, K_PART)


@gluon.jit
def _tile_at(number, ring, M, N, K, K_PART):
    """First row and column of a tile, then the part of the sum, its first and last term.

    Tiles of a part are in an order that covers GROUP_ROWS rows at a time.
    """
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_N: gl.constexpr = ring[1].shape[1]
    GROUP_M: gl.constexpr = GROUP_ROWS // BLOCK_M
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    part, number = number // (tiles_m * tiles_n), number % (tiles_m * tiles_n)
    group = number // (GROUP_M * tiles_n)
    first = group * GROUP_M
    rows = gl.minimum(tiles_m - first, GROUP_M)
    within = number % (GROUP_M * tiles_n)
    m0, n0 = (first + within % rows) * BLOCK_M, within // rows * BLOCK_N
    return m0, n0, part, part * K_PART, gl.minimum((part + 1) * K_PART, K)


@gluon.jit
def _load_tiles(a_desc, b_desc, ring, counter_ptr, M, N, K, K_PART):
    """Fills stages of the ring as the warpgroups empty them, then a last one with no tile."""
    a_ring, b_ring, full, empty, numbers = ring
    count, step = _count(ring, M, N, K, K_PART), 0
    number = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    while number < count:
        m0, n0, part, first, last = _tile_at(number, ring, M, N, K, K_PART)
        for k in range(first, last, BLOCK_K):
            stage = step % STAGES
            # A barrier's phase flips each time the ring has gone round. Waiting for the opposite of
            # the readers' phase returns at once in the first round, when all stages are empty.
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            _write_number(numbers.index(stage), number)
            loaded = full.index(stage)
            mbarrier.expect(loaded, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(a_desc, [m0, k], loaded, a_ring.index(stage))
            tma.async_copy_global_to_shared(b_desc, [n0, k], loaded, b_ring.index(stage))
            step += 1
        number = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    _write_number(numbers.index(stage), number)
    mbarrier.arrive(full.index(stage), count=1)
    if number == count + gl.num_programs(0) - 1:  # no program will count again
        gl.store(counter_ptr, 0)


@gluon.jit
def _write_number(place, number):
    """Stores a number in shared memory; the barrier that is next arrived at publishes it."""
    place.store(gl.full([1], number, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _next_number(ring, step):
    """The number of the tile of a stage, once this stage is full."""
    a_ring, b_ring, full, empty, numbers = ring
    stage = step % STAGES
    mbarrier.wait(full.index(stage), step // STAGES & 1)
    return gl.max(numbers.index(stage).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def _multiply_tiles(
    HALF: gl.constexpr, ring, output, factors, M, N, K, K_PART,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """Multiplies the first (HALF = 0) or last (HALF = 1) rows of tiles, scales and stores them."""
    a_ring, b_ring, full, empty, numbers = ring
    out_desc, out_buffers = output
    a_scale_ptr, b_scale_ptr, bias_ptr = factors
    HALF_M: gl.constexpr = out_buffers.shape[1]
    BLOCK_N: gl.constexpr = b_ring.shape[1]
    IS_INT: gl.constexpr = a_ring.dtype == gl.int8
    WIDTH: gl.constexpr = 128 if IS_INT else BLOCK_N  # Triton has no wider instruction for int8
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    count, step = _count(ring, M, N, K, K_PART), 0
    number = _next_number(ring, step)
    while number < count:
        m0, n0, part, first, last = _tile_at(number, ring, M, N, K, K_PART)
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
        row = part * gl.cdiv(M, 2 * HALF_M) * 2 * HALF_M + m0  # whole tiles, which TMA stores
        _store(finished, row, n0, out_desc, out_buffers.index(HALF))
        number = _next_number(ring, step)
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
def _multiply_scaled_tiles(
    HALF: gl.constexpr, ring, output, scales, bias_ptr, sizes,
    B_ROWS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """`_multiply_tiles` for scales of BLOCK_K terms: float32 sums hold what has been scaled.

    A warpgroup has registers for these sums and for the product of half the columns.
    """
    M, N, K, K_PART = sizes
    a_ring, b_ring, full, empty, numbers = ring
    out_desc, out_buffers = output
    a_scale_ptr, b_scale_ptr, b_scales, stride_am, stride_ak, stride_bn, stride_bk = scales
    HALF_M: gl.constexpr = out_buffers.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_N, 32])
    loaded: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    zeros = gl.zeros([HALF_M, HALF_N], gl.float32, layout)
    count, step = _count(ring, M, N, K, K_PART), 0
    number = _next_number(ring, step)
    while number < count:
        m0, n0, part, first, last = _tile_at(number, ring, M, N, K, K_PART)
        m0 += HALF * HALF_M
        m = m0 + gl.arange(0, HALF_M, gl.SliceLayout(1, layout))
        n = n0 + gl.arange(0, 2 * HALF_N, loaded)
        a_ptrs, b_ptrs = a_scale_ptr + m * stride_am, b_scale_ptr + n * stride_bn
        left, right = zeros, zeros
        a_scale = gl.load(a_ptrs + first // BLOCK_K * stride_ak, mask=m < M, other=0.0)
        if B_ROWS:
            b_scale = gl.load(b_ptrs + first // BLOCK_K * stride_bk, mask=n < N, other=0.0)
        for k in range(first, last, BLOCK_K):
            stage, buffer = step % STAGES, b_scales.index(2 * HALF + step % 2)
            if B_ROWS:
                buffer.store(b_scale)
                of_left, of_right = buffer.slice(0, HALF_N), buffer.slice(HALF_N, HALF_N)
            else:
                row, b_row = n0 // HALF_N, b_scale_ptr + k // BLOCK_K * stride_bk
                of_left = gl.load(b_row + row * stride_bn)
                of_right = gl.load(b_row + gl.minimum(row + 1, (N - 1) // HALF_N) * stride_bn)
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            a, b = a_ring.index(stage).slice(HALF * HALF_M, HALF_M), b_ring.index(stage)
            b_left, b_right = b.slice(0, HALF_N), b.slice(HALF_N, HALF_N)
            product = warpgroup_mma(a, b_left.permute((1, 0)), zeros, use_acc=False, is_async=True)
            # The next scales arrive while the tensor cores multiply.
            next_tile = gl.minimum(k + BLOCK_K, last - 1) // BLOCK_K
            next_scale = gl.load(a_ptrs + next_tile * stride_ak, mask=m < M, other=0.0)
            if B_ROWS:
                b_scale = gl.load(b_ptrs + next_tile * stride_bk, mask=n < N, other=0.0)
            product = warpgroup_mma_wait(0, deps=[product])
            left = _add_scaled(left, product, a_scale, of_left, layout, B_ROWS)
            # Returns at once. Else, the assembler would overlap both products and spill registers.
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            product = warpgroup_mma(a, b_right.permute((1, 0)), zeros, use_acc=False, is_async=True)
            product = warpgroup_mma_wait(0, deps=[product])
            mbarrier.arrive(empty.index(stage))
            right = _add_scaled(right, product, a_scale, of_right, layout, B_ROWS)
            a_scale = next_scale
            step += 1
        place = (out_desc, out_buffers.index(HALF), part * gl.cdiv(M, 2 * HALF_M) * 2 * HALF_M + m0)
        _add_bias_and_store(left, n0, N, bias_ptr, place, BIAS)
        _add_bias_and_store(right, n0 + HALF_N, N, bias_ptr, place, BIAS)
        number = _next_number(ring, step)
    tma.store_wait(0)


@gluon.jit
def _add_bias_and_store(sums, n0, N, bias_ptr, place, BIAS: gl.constexpr):
    """Stores sums at columns from n0 on of the row in `place`."""
    out_desc, buffer, row = place
    n = n0 + gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    sums = gluon_finish(sums, 1.0, 1.0, gluon_load_bias(bias_ptr, n, N, BIAS), BIAS)
    _store(sums, row, n0, out_desc, buffer)


@gluon.jit
def _add_scaled(sums, product, a_scale, b_scale, layout: gl.constexpr, B_ROWS: gl.constexpr):
    """`sums + product * a_scale * b_scale`, not reordered with later barriers."""
    if B_ROWS:
        columns: gl.constexpr = gl.SliceLayout(0, layout)
        sums += product * a_scale[:, None] * b_scale.load(columns)[None, :]
    else:
        sums += product * (a_scale * b_scale)[:, None]
    return gl.inline_asm_elementwise("", "=f,0", [sums], gl.float32, is_pure=False, pack=1)


@gluon.jit
def _allocate(desc, COUNT: gl.constexpr):
    """Shared memory for blocks of a tensor."""
    shape: gl.constexpr = [COUNT, desc.block_shape[0], desc.block_shape[1]]
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout)


@gluon.jit
def _make_ring(a_desc, b_desc):
    """Stages for blocks of both operands, barriers that say which are full or empty, and numbers.

    The numbers are those of the stages' tiles.
    """
    a_ring = _allocate(a_desc, STAGES)
    b_ring = _allocate(b_desc, STAGES)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # of two warpgroups
    fence_async_shared()
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.int32, [STAGES, 1], plain)
    return a_ring, b_ring, full, empty, numbers


@gluon.jit
def _matmul_tiles_hopper_kernel(
    a_desc, b_desc, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr, counter_ptr, M, N, K, K_PART,
    stride_am, stride_ak, stride_bn, stride_bk, B_ROWS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    ring = _make_ring(a_desc, b_desc)
    out_buffers = _allocate(out_desc, 2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    b_scales = gl.allocate_shared_memory(gl.float32, [4, 2 * HALF_N if B_ROWS else 32], plain)
    output = (out_desc, out_buffers)
    scales = (a_scale_ptr, b_scale_ptr, b_scales, stride_am, stride_ak, stride_bn, stride_bk)
    sizes = (M, N, K, K_PART)
    gl.warp_specialize(
        [
            (_multiply_scaled_tiles, (0, ring, output, scales, bias_ptr, sizes, B_ROWS, BIAS)),
            (_multiply_scaled_tiles, (1, ring, output, scales, bias_ptr, sizes, B_ROWS, BIAS)),
            (_load_tiles, (a_desc, b_desc, ring, counter_ptr, M, N, K, K_PART)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _matmul_hopper_kernel(
    a_desc, b_desc, out_desc, a_scale_ptr, b_scale_ptr, bias_ptr, counter_ptr, M, N, K, K_PART,
    A_ROWS: gl.constexpr, B_ROWS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    ring = _make_ring(a_desc, b_desc)
    out_buffers = _allocate(out_desc, 2)
    output = (out_desc, out_buffers)
    factors = (a_scale_ptr, b_scale_ptr, bias_ptr)
    gl.warp_specialize(
        [
            (_multiply_tiles, (0, ring, output, factors, M, N, K, K_PART, A_ROWS, B_ROWS, BIAS)),
            (_multiply_tiles, (1, ring, output, factors, M, N, K, K_PART, A_ROWS, B_ROWS, BIAS)),
            (_load_tiles, (a_desc, b_desc, ring, counter_ptr, M, N, K, K_PART)),
        ],
        [4, 1],  # warps of the last two functions; the first runs in the kernel's own warps
        [232, 40],  # registers per thread of these two; the first gets the rest, also 232
    )


def plan_hopper(
    device: torch.device,
    out_dtype: torch.dtype,
    integers: tuple,
    tile: dict,
    tiles: int,
    has_scaled_tiles: bool,
    constants: dict,
) -> Launch:
    """The launch for M, N, K and terms in a part; all rows must be multiples of 16 bytes.

    `tiles` is the number of output tiles, times that of parts. Scales may be of tiles, with
    WIDE_TILE: then their strides follow the sizes.
    """
    kernel = _matmul_tiles_hopper_kernel if has_scaled_tiles else _matmul_hopper_kernel
    stored = STORED_BYTES // 2 if has_scaled_tiles and constants["B_ROWS"] else STORED_BYTES
    half_m = tile["BLOCK_M"] // 2
    blocks = (
        [tile["BLOCK_M"], tile["BLOCK_K"]],
        [tile["BLOCK_N"], tile["BLOCK_K"]],
        [half_m, stored // half_m // out_dtype.itemsize],
    )
    grid = (min(num_sms(device), tiles),)
    return Launch(kernel, grid, integers, blocks, is_counted=True, **constants, num_warps=4)
