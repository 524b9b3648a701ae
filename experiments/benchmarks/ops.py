"""Times each operation of a linear layer alone: quantizing and multiplying, in 8 and 16 bits.

    python -m experiments.benchmarks ops
    python -m experiments.benchmarks ops dims=[1280] tokens=65536

Each dim is measured as dim -> 4 dim ("up") and 4 dim -> dim ("down"), on random numbers; on a GPU
as a CUDA graph whose inputs are not in the cache. An operation counts only if it equals the
definition in plain torch. Lines go to `runs/bench/ops/<time>.jsonl` and to the console.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from experiments.benchmarks.configs import OpsConfig
from experiments.benchmarks.measure import Lines, check_error
from lowprec import ops
from lowprec.formats import parse_format
from lowprec.nn.timing import median_ms
from lowprec.ops import reference
from lowprec.train.build import pick_device

FORMATS = {"int8": ("int8", "int8"), "fp8": ("e4m3", "e5m2")}  # of x and W, and of g
EXACT, HIGH, FP8 = 1e-3, 1e-2, 2e-2  # relative: rounded in another order; 16-bit sums; fp8 sums
MULTIPLE = 16  # torch's own 8-bit products take only sizes that are multiples of it
UNITS = {"TFLOP/s": 1e9, "GB/s": 1e6}  # work per millisecond in one unit of a rate


class Operation(NamedTuple):
    """`run()` is timed and must return the tensors of `expected()`, a tensor or a tuple.

    `most`: the largest relative error. `work`: operations, or bytes read and written, of one run;
    `unit`: of work by time.
    """

    case: str
    dtype: str
    run: Callable
    expected: Callable
    most: float
    work: int
    unit: str = "TFLOP/s"

    def check(self) -> None:
        """Raises Wrong if the result is not what the definition gives."""
        values, expected = self.run(), self.expected()
        if isinstance(values, Tensor):
            values, expected = (values,), (expected,)
        for actual, correct in zip(values, expected, strict=True):
            check_error(self.case, actual, correct, self.most)


def main(config: OpsConfig) -> None:
    """Measures each size; exits with 1 if one of ours was wrong or failed."""
    device = pick_device(config.device)
    lines = Lines(config.run_dir, "ops", device)
    for dim in config.dims:
        for direction, sizes in (("up", (dim, 4 * dim)), ("down", (4 * dim, dim))):
            facts = {"dim": dim, "tokens": config.tokens, "direction": direction}
            bench_shape((config.tokens, *sizes), device, config.repeats, lines, facts)
    lines.exit_if_failed()


def bench_shape(shape: tuple, device: torch.device, repeats: int, lines: Lines, facts: dict):
    """Measures the operations of one layer; ratios are to the 16-bit product, which comes first."""
    name, base_ms = "x".join(map(str, shape)), {}
    for operation in operations(*shape, device):
        case, dtype = operation.case, operation.dtype
        product, _, library = case.partition(",")
        with lines.measurement(case, name, dtype, is_ours=not library, **facts) as row:
            operation.check()
            ms = median_ms(operation.run, device, repeats, graph=True, cold=True)
            if dtype == "bf16":
                base_ms[product] = ms
            rate = operation.work / ms / UNITS[operation.unit]
            row.update(ms=ms, rate=rate, rate_unit=operation.unit)
            if product in base_ms:
                row.update(ratio_to=f"{product}, bf16", ratio=base_ms[product] / ms)


def operations(M: int, K: int, N: int, device: torch.device) -> Iterator[Operation]:
    """Yields a layer's products, [M, K] -> [M, N]: 16-bit, then ours by format, then torch's."""
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": device}
    x_MK, g_MN = torch.randn(M, K, **options), torch.randn(M, N, **options)
    w_NK, bias = torch.randn(N, K, **options) / K**0.5, torch.randn(N, **options)
    yield from _products_16_bit(x_MK, w_NK, g_MN, bias)
    for dtype in FORMATS:
        yield from _quantizations(x_MK, w_NK, g_MN, dtype)
        yield from _products_8_bit(x_MK, w_NK, g_MN, bias, dtype)
    if not any(size % MULTIPLE for size in (M, K, N)):
        for case, a, b, format in (
            ("output", x_MK, w_NK, "e4m3"),
            ("grad_input", g_MN, w_NK.T, "e5m2"),
        ):
            yield _int_mm(case, a, b)
            yield _scaled_mm(case, a, b, format, "rowwise")
            yield _scaled_mm(case, a, b, format, "tensorwise")


def _products_16_bit(*operands: Tensor) -> Iterator[Operation]:
    """Compared with float32; `operands`: x, W, g and the bias."""
    products = {
        "output": lambda x, w, g, bias: linear(x, w, bias),
        "grad_input": lambda x, w, g, bias: g @ w,
        "grad_weight": lambda x, w, g, bias: g.T @ x,
    }
    work = 2 * operands[0].shape[0] * operands[1].numel()
    for case, product in products.items():

        def expected(product: Callable = product) -> Tensor:
            return product(*(tensor.float() for tensor in operands))

        yield Operation(case, "bf16", partial(product, *operands), expected, HIGH, work)


def _quantizations(x: Tensor, w: Tensor, g: Tensor, dtype: str) -> Iterator[Operation]:
    """What SwitchBack quantizes, compared with `lowprec.ops.reference`."""
    forward, backward = map(parse_format, FORMATS[dtype])
    operation = partial(Operation, dtype=dtype, most=EXACT, unit="GB/s")

    def expected_w() -> tuple:
        q, scale = reference.quantize(w, forward, "tensorwise")
        return q, q.float().T, scale

    yield operation(
        "quantize_x",
        run=lambda: ops.quantize(x, forward, "rowwise")[::2],
        expected=lambda: reference.quantize(x, forward, "rowwise"),
        work=3 * x.numel(),
    )
    yield operation(
        "quantize_g",
        run=lambda: ops.quantize_rows_and_sum(g, backward),
        expected=lambda: (*reference.quantize(g, backward, "rowwise"), g.float().sum(dim=0)),
        work=3 * g.numel(),
    )
    yield operation(
        "quantize_w",
        run=lambda: ops.quantize(w, forward, "tensorwise", layout="both"),
        expected=expected_w,
        work=6 * w.numel(),  # bytes: read for its maximum, read again, written twice
    )


def _products_8_bit(
    x: Tensor, w: Tensor, g: Tensor, bias: Tensor, dtype: str
) -> Iterator[Operation]:
    """Our scaled products; int8 is exact up to the rounding of the output."""
    forward, backward = map(parse_format, FORMATS[dtype])
    x_q, x_scale = ops.quantize(x, forward, "rowwise")[::2]
    g_q, g_scale, _ = ops.quantize_rows_and_sum(g, backward)
    w_q, w_q_transposed, w_scale = ops.quantize(w, forward, "tensorwise", layout="both")
    most = EXACT if dtype == "int8" else FP8
    for case, a, b, scale, added in (
        ("output", x_q, w_q, x_scale, bias),
        ("grad_input", g_q, w_q_transposed, g_scale, None),
    ):
        operands = (a, b, scale, w_scale, added, torch.bfloat16)
        run, expected = partial(ops.matmul, *operands), partial(reference.matmul, *operands)
        yield Operation(case, dtype, run, expected, most, 2 * a.shape[0] * b.numel())


def _int_mm(case: str, a: Tensor, b: Tensor) -> Operation:
    """`torch._int_mm`, which leaves int32 sums."""
    int8 = parse_format("int8")
    a_q, b_q = (reference.quantize(t, int8, "tensorwise")[0].contiguous() for t in (a, b))
    run, expected = partial(torch._int_mm, a_q, b_q.T), lambda: a_q.double() @ b_q.double().T
    work = 2 * a.shape[0] * b.numel()
    return Operation(f"{case}, torch._int_mm", "int8", run, expected, 0.0, work)


def _scaled_mm(case: str, a: Tensor, b: Tensor, format: str, granularity: str) -> Operation:
    """`torch._scaled_mm` with a scale for each row of both operands, or for each operand."""
    a_q, a_scale = reference.quantize(a, parse_format(format), granularity)
    b_q, b_scale = reference.quantize(b, parse_format("e4m3"), granularity)
    b_q, high = b_q.contiguous(), torch.bfloat16
    run = partial(torch._scaled_mm, a_q, b_q.T, a_scale, b_scale.T, out_dtype=high)
    run = partial(run, use_fast_accum=True)
    expected = partial(reference.matmul, a_q, b_q, a_scale, b_scale, None, high)
    name, work = f"{case}, torch._scaled_mm {granularity}", 2 * a.shape[0] * b.numel()
    return Operation(name, "fp8", run, expected, FP8, work)
