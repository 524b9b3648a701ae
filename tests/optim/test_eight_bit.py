"""StableAdamW's 8-bit moments against torchao; their rounding in kernels, state and limits."""

import math

import pytest
import torch
import triton
import triton.language as tl

from lowprec.optim import StableAdamW
from lowprec.optim.eight_bit import BLOCK, code_books, dequantize, encoded, quantize_
from tests.optim.optimizers import assert_near

CPU = torch.device("cpu")
SHAPES = {"matrix": (70, 130), "vector": (4096,), "bias": (300,)}  # 35.5 and 16 blocks
OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "optim_bits": 8}


def numbers(is_signed):
    """The levels, 65 numbers around each bound, and others of all sizes; 1 begins each block."""
    book = code_books(CPU)[int(is_signed)]
    bounds = book[258:513]
    near = [book[:256], bounds]
    for direction in (-2.0, 2.0):
        x = bounds
        for _ in range(32):
            x = x.nextafter(torch.tensor(direction))
            near.append(x)
    random = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    near += [random, random.sign() * 10 ** (-9 * random.abs())]
    x = torch.cat(near).clamp(-1, 1)
    x = x if is_signed else x[x >= 0]
    x = x[: len(x) // (BLOCK - 1) * (BLOCK - 1)].view(-1, BLOCK - 1)
    return torch.cat([torch.ones(len(x), 1), x], dim=1).flatten()


def quantized(x, is_signed):
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.zeros(-(-x.numel() // BLOCK), device=x.device)
    quantize_(codes, scales, is_signed, x, torch.ones((), device=x.device))
    return codes, scales


@pytest.mark.parametrize("is_signed", [True, False])
def test_levels_and_rounding_are_torchaos(is_signed, torchao):
    from torchao.optim import quant_utils

    levels = torch.tensor(quant_utils.create_dynamic_map(signed=is_signed))
    assert torch.equal(code_books(CPU)[int(is_signed), :256], levels)
    x = numbers(is_signed)
    codes, scales = quantized(x, is_signed)
    assert (scales == 1).all() and len(codes.unique()) == 256
    assert torch.equal(codes, quant_utils.quantize_8bit_with_qmap(x, levels))
    x = x * torch.rand(x.shape) * 1e-3
    scaled, expected_scales = quant_utils.scale_tensor(x, BLOCK)
    codes, scales = quantized(x, is_signed)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes, quant_utils.quantize_8bit_with_qmap(scaled, levels))
    expected = quant_utils.dequant_with_qmap(codes, levels, scales)
    assert torch.equal(dequantize(codes, scales, is_signed), expected)


@triton.jit
def encode_kernel(x_ptr, book_ptr, codes_ptr, SIGNED: tl.constexpr, CHUNK: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    codes, _ = encoded(tl.load(x_ptr + at), book_ptr, SIGNED, CHUNK)
    tl.store(codes_ptr + at, codes)


@pytest.mark.usefixtures("right_interpreter")
@pytest.mark.parametrize("is_signed", [True, False])
def test_kernels_round_as_the_definition_does(is_signed, device):
    x = numbers(is_signed).to(device)
    x = x[: len(x) // 1024 * 1024]
    codes = torch.zeros(x.shape, dtype=torch.uint8, device=device)
    book = code_books(x.device)[int(is_signed)]
    encode_kernel[(len(x) // 1024,)](x, book, codes, SIGNED=is_signed, CHUNK=1024)
    assert torch.equal(codes, quantized(x, is_signed)[0])


def test_blocks_of_zeros_and_of_the_smallest_numbers():
    for value in (0.0, 2.0**-149, 2.0**-126):
        x = torch.zeros(300)
        x[299] = value
        codes, scales = quantized(x, True)
        assert scales.tolist() == [2.0**-126] * 2
        error = dequantize(codes, scales, True) - x
        assert not error[:256].any() and error.abs().max() <= 2.0**-126 / 64


def make(dtype=torch.float32, device="cpu", **options):
    generator = torch.Generator().manual_seed(0)
    named = [
        (name, torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)))
        for name, shape in SHAPES.items()
    ]
    return StableAdamW(named, **{**OPTIONS, **options})


def take(optimizer, steps):
    """The gradients jump at step 4; those of the vector are not finite at step 2."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for name, p in zip(optimizer.names, optimizer._params(), strict=True):
            grad = torch.randn(p.shape, generator=generator) * (1.0 if step == 4 else 0.01)
            grad[..., 0] *= math.inf if (step, name) == (2, "vector") else 1
            p.grad = grad.to(p.device, p.dtype)
        optimizer.step()


def states(optimizer):
    return [optimizer.state[p] for p in optimizer._params()]


def rms_of(state, grad):
    """RMS_t of the coming step of torchao's AdamW."""
    u, t = (state["exp_avg_sq"], state["step"]) if state else (torch.zeros_like(grad), 0)
    beta = OPTIONS["betas"][1]
    u = u.lerp(grad.square(), 1 - beta) / (1 - beta ** (t + 1))
    return (grad.square() / u.clamp(min=1e-12)).mean().sqrt().item()


@pytest.mark.parametrize("clip_threshold", [None, 1.0])
def test_parameters_move_as_under_torchaos_adamw_at_the_clipped_rate(torchao, clip_threshold):
    ours = make(clip_threshold=clip_threshold)
    params = [torch.nn.Parameter(p.detach().clone()) for p in ours._params()[1:]]
    rule = {name: OPTIONS[name] for name in ("lr", "betas", "weight_decay")}
    theirs = torchao.AdamW8bit([{"params": [p]} for p in params], **rule, eps=1e-6)
    exact = make(clip_threshold=clip_threshold, optim_bits=32)
    for step in range(3, 13):
        for optimizer in (ours, exact):
            take(optimizer, [step])
        rms = []
        for p, other, group in zip(ours._params()[1:], params, theirs.param_groups, strict=True):
            other.grad = p.grad.clone()
            rms.append(rms_of(theirs.state[other], other.grad))
            if clip_threshold:
                group["lr"].fill_(OPTIONS["lr"] / max(1.0, rms[-1]))
        theirs.step()
        assert ours.statistics[1:, 0].tolist() == pytest.approx(rms, rel=1e-3)
        assert min(rms) > 1.3 or step != 4  # so that clipping lowers the rate
    _, vector, bias = ours._params()
    assert_near(vector, params[0], 2e-3, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(bias, params[1], rtol=1e-4, atol=1e-5)
    for kind in ("exp_avg", "exp_avg_sq"):
        codes, expected = states(ours)[1][kind], theirs.state[params[0]][kind].codes
        assert_near(codes.int(), expected.int(), 2e-3, rtol=0, atol=0.5)
    errors = [(vector - p).abs().mean().item() for p in (params[0], exact._params()[1])]
    assert errors[0] < 0.01 * errors[1]


def test_which_moments_have_8_bits_and_how_many_bytes_they_take():
    def kinds(optimizer):
        take(optimizer, [3])
        return {
            name
            for name, state in zip(optimizer.names, states(optimizer), strict=True)
            if state["exp_avg"].dtype == torch.uint8
        }

    assert kinds(make()) == {"matrix", "vector"}
    assert kinds(make(min_8bit_size=4097)) == {"matrix"}
    assert kinds(make(min_8bit_size=1, override_32bit=["m*", "vec*r"])) == {"bias"}
    assert kinds(make(dtype=torch.float64)) == set()
    transposed = StableAdamW([("t", torch.nn.Parameter(torch.randn(70, 130).T))], optim_bits=8)
    assert kinds(transposed) == set()
    optimizer = make()
    assert kinds(optimizer) == set(optimizer.tensors()["exp_avg_scale"])
    for state, p in zip(states(optimizer)[:2], optimizer._params(), strict=False):
        num_bytes = sum(x.nbytes for x in state.values()) - state["updates"].nbytes
        assert num_bytes == 2 * p.numel() + 8 * math.ceil(p.numel() / BLOCK)


def test_32_bit_moments_are_refused():
    exact = make(optim_bits=32)
    take(exact, [3])
    with pytest.raises(ValueError, match=r"\(matrix\) has 32-bit moments .* not 8-bit"):
        make().load_state_dict(exact.state_dict())
