"""The patched interpreter casts and multiplies as torch does."""

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU")


@triton.jit
def _cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + at).to(tl.float32)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty))


@triton.jit
def _dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr, ACC: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at), out_dtype=ACC))


@triton.jit
def _fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y, z = tl.load(x_ptr + at), tl.load(y_ptr + at), tl.load(z_ptr + at)
    tl.store(out_ptr + at, tl.fma(x, y, z))


def all_bfloat16():
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16)


def cast(x, dtype):
    out = torch.empty_like(x, dtype=dtype)
    _cast_kernel[(1,)](x, out, SIZE=x.numel())
    return out


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_casts_round_like_torch(dtype):
    generator = torch.Generator().manual_seed(0)
    near = all_bfloat16().float()  # all binades, with the ties of float8
    near = near[near.abs() <= torch.finfo(dtype).max][: 2**15]
    random = torch.randn(2**15, generator=generator) * 10
    for x in (random, torch.nn.functional.pad(near, (0, 2**15 - len(near)))):
        x = x.contiguous()
        assert torch.equal(cast(x, dtype).float(), x.to(dtype).float())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str
)
def test_low_precision_dot_matches_torch(dtype):
    generator = torch.Generator().manual_seed(0)
    is_int = dtype == torch.int8
    size = 9 if is_int else 1
    a, b = ((torch.randn(32, 32, generator=generator) * size).to(dtype) for _ in range(2))
    out = torch.empty(32, 32, dtype=torch.int32 if is_int else torch.float32)
    _dot_kernel[(1,)](a, b, out, SIZE=32, ACC=tl.int32 if is_int else tl.float32)
    exact = a.double() @ b.double()
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=0 if is_int else 1e-5)


def test_fma_rounds_once():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(1024, generator=generator) for _ in range(2))
    z, out = -(x * y), torch.empty(1024)  # leaves the rounding error of the product
    _fma_kernel[(1,)](x, y, z, out, SIZE=1024)
    assert torch.equal(out.double(), x.double() * y.double() + z.double())
    assert (out != 0).any()
