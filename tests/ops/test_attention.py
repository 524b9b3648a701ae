"""The attention kernels against F.scaled_dot_product_attention in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from lowprec.ops import triton_attention as kernels

pytestmark = pytest.mark.usefixtures("poisoned")
SHAPES = [  # tokens, heads, head width
    *[(33, 3, 64), (32, 2, 64), (1, 1, 64), (64, 1, 64)],
    *[(7, 2, 80), (17, 1, 32), (50, 1, 128), (5, 3, 8)],
    *[(77, 2, 64), (96, 1, 64)],
]
LARGE = [(129, 2, 80), (129, 1, 64), (129, 2, 24), (129, 1, 72)]  # without a mask

HALVES, BOTH = (torch.bfloat16, torch.float16), (False, True)
# on a GPU the kernels take 16 bits; the interpreter is slow
DTYPES = HALVES if torch.cuda.is_available() else (torch.float32,)
CASES = [(shape, *case) for shape in SHAPES for case in itertools.product(DTYPES, BOTH)]
CASES += [(shape, dtype, False) for shape in LARGE for dtype in DTYPES]
if not torch.cuda.is_available():
    halves = [*SHAPES[:2], (77, 2, 64)]  # the last has two parts
    CASES += [(shape, *case) for shape in halves for case in zip(HALVES, BOTH, strict=True)]
    CASES += [(LARGE[0], dtype, False) for dtype in HALVES]


def make(tokens, num_heads, head_width, dtype, device):
    qkv = torch.randn(2, tokens, 3 * num_heads * head_width) * 2
    g = torch.randn(2, tokens, num_heads * head_width)
    return qkv.to(dtype).to(device), g.to(dtype).to(device)


@pytest.fixture
def dtype(device):
    """The most exact that the kernels take; in the interpreter they also take float32."""
    return torch.float16 if device.type == "cuda" else torch.float32


def by_torch(qkv, g, num_heads, is_causal):
    """Output, and gradient of qkv."""
    qkv = qkv.clone().requires_grad_()
    parts = qkv.unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)
    heads = F.scaled_dot_product_attention(*parts, is_causal=is_causal)
    output = heads.transpose(1, 2).flatten(2)
    return output.detach(), torch.autograd.grad(output, qkv, g)[0]


def by_kernels(qkv, g, num_heads, is_causal):
    gradient = kernels.attention_backward(g, qkv, num_heads, is_causal)
    return kernels.attention(qkv, num_heads, is_causal), gradient


@pytest.mark.parametrize(("shape", "dtype", "is_causal"), CASES, ids=str)
def test_kernels_are_as_close_to_float64_as_torch(device, shape, dtype, is_causal):
    qkv, g = make(*shape, dtype, device)
    options = shape[1], is_causal
    exact = by_torch(qkv.double(), g.double(), *options)
    results, peers = by_kernels(qkv, g, *options), by_torch(qkv, g, *options)
    for result, peer, true in zip(results, peers, exact, strict=True):
        assert result.dtype == dtype and result.shape == true.shape
        most = 1.1 * (peer - true).norm() + torch.finfo(dtype).eps * 0.1 * true.norm()
        assert (result - true).norm() <= most


def test_numbers_of_tokens_around_blocks(device, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for tokens in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 81, 95, 129):
        qkv, g = make(tokens, 1, 16, dtype, device)
        for is_causal in (False, True) if tokens <= 96 else (False,):
            expected = by_torch(qkv.double(), g.double(), 1, is_causal)
            for result, true in zip(by_kernels(qkv, g, 1, is_causal), expected, strict=True):
                torch.testing.assert_close(result.double(), true, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tokens", [5, 129])
def test_strided_tensors(device, dtype, tokens):
    qkv, g = make(tokens, 2, 16, dtype, device)
    expected = by_kernels(qkv, g, 2, False)
    strided = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (qkv, g))
    assert all(map(torch.equal, by_kernels(*strided, 2, False), expected))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # inf - inf, as on a GPU
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")
@pytest.mark.parametrize(("tokens", "token"), [(5, 3), (129, 3), (129, 128)])
def test_nan_stays_in_its_sample_and_head(device, dtype, tokens, token):
    qkv, g = make(tokens, 2, 16, dtype, device)
    qkv[0, token, 16] = torch.nan  # a query of the second head
    output, gradient = by_kernels(qkv, g, 2, False)
    assert output[0, token, 16:].isnan().all() and output.isnan().sum() == 16
    heads = gradient[0].view(tokens, 3, 2, 16)
    assert gradient[1].isfinite().all() and heads[:, :, 0].isfinite().all()
    assert heads[:, 1:, 1].isnan().all()
