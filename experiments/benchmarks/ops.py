"""Times each operation of a linear layer alone: quantizing and multiplying, 8 bit and 16 bit.

    python -m experiments.benchmarks.ops
    python -m experiments.benchmarks.ops dims=[1280] tokens=[16384,65536]

Each dim is measured as dim -> 4 dim ("up") and 4 dim -> dim ("down"), on random numbers; on a GPU
as a CUDA graph whose inputs are not in the cache. An operation counts only if a slice of its rows
equals the definition in plain torch. Lines go to `runs/bench/ops/<time>.jsonl` and to the console.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from experiments.benchmarks.report import Lines, check_error, median_ms
from experiments.entry import run_command
from lowprec import ops
from lowprec.config.schema import key
from lowprec.formats import parse_format
from lowprec.ops import reference
from lowprec.train.build import pick_device

FORMATS = {"int8": ("int8", "int8"), "fp8": ("e4m3", "e5m2")}  # of x and W, and of g
EXACT, HIGH, FP8 = 1e-3, 1e-2, 2e-2  # relative: rounded in another order; 16-bit sums; fp8 sums
SLICE = 64  # rows of the output that are checked
MULTIPLE = 16  # torch's own 8-bit products take only sizes that are multiples of it
UNITS = {"TFLOP/s": 1e9, "GB/s": 1e6}  # work per millisecond in one unit of a rate


@dataclass
class OpsConfig:
    """Keys of the command."""

    dims: list[int] = key([768, 1024, 1280, 1408, 1664, 2048, 4096], "widths", least=1)
    tokens: list[int] = key([32768], "rows of the input", least=1)
    repeats: int = key(50, "calls of which the median is kept", least=1)
    device: str = key("auto", "where", choices=("auto", "cpu", "cuda"))
    run_dir: str = key("runs", "the lines go into its bench/ops")


@dataclass(frozen=True)
class Operation:
    """`run()` is timed; `part(run())`, its first rows, should be the tensors of `expected()`.

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
    part: Callable = lambda result: (result[:SLICE],)

    @property
    def is_ours(self) -> bool:
        """False for another library's operation."""
        return "," not in self.case

    def check(self) -> None:
        """Raises Wrong if the slice is not what the definition gives."""
        for value, expected in zip(self.part(self.run()), self.expected(), strict=True):
            check_error(self.case, value, expected, self.most)


def main(config: OpsConfig) -> None:
    """Measures each size; exits with 1 if one of ours was wrong or failed."""
    device = pick_device(config.device)
    lines = Lines(config.run_dir, "ops", device)
    for tokens in config.tokens:
        for dim in config.dims:
            for direction, sizes in (("up", (dim, 4 * dim)), ("down", (4 * dim, dim))):
                about = {"dim": dim, "tokens": tokens, "direction": direction}
                bench_shape((tokens, *sizes), device, config.repeats, lines, about)
    lines.exit_if_failed()


def bench_shape(shape: tuple, device: torch.device, repeats: int, lines: Lines, about: dict):
    """Measures the operations of one layer; ratios are to the 16-bit product, which comes first."""
    name, base_ms = "x".join(map(str, shape)), {}
    for operation in operations(*shape, device):
        case, dtype = operation.case, operation.dtype
        product = case.partition(",")[0]
        with lines.measurement(case, name, dtype, is_ours=operation.is_ours, **about) as row:
            operation.check()
            ms = median_ms(operation.run, device, repeats, graph=True, cold=True)
            if dtype == "bf16":
                base_ms[product] = ms
            rate = operation.work / ms / UNITS[operation.unit]
            row.update(ms=ms, rate=rate, rate_unit=operation.unit)
            if product in base_ms:
                row.update(ratio_to=f"{product}, bf16", ratio=base_ms[product] / ms)


def operations(M: int, K: int, N: int, device: torch.device) -> Iterator[Operation]:
    """Yields those of a layer [M, K] -> [M, N]: 16 bit, then ours by format, then torch's."""
    torch.manual_seed(0)
    kind = {"dtype": torch.bfloat16, "device": device}
    x_MK, g_MN = torch.randn(M, K, **kind), torch.randn(M, N, **kind)
    w_NK, bias = torch.randn(N, K, **kind) / K**0.5, torch.randn(N, **kind)
    yield from _products_16_bit(x_MK, w_NK, g_MN, bias)
    for dtype in FORMATS:
        yield from _quantizations(x_MK, w_NK, g_MN, dtype)
        yield from _products_8_bit(x_MK, w_NK, g_MN, bias, dtype)
    if not any(size % MULTIPLE for size in (M, K, N)):
        yield from _products_of_torch(x_MK, w_NK, g_MN)


def _products_16_bit(x: Tensor, w: Tensor, g: Tensor, bias: Tensor) -> Iterator[Operation]:
    """Compared with float32."""
    work = 2 * x.shape[0] * w.numel()
    cases = {
        "output": (
            lambda: linear(x, w, bias),
            lambda: (linear(x[:SLICE].float(), w.float(), bias.float()),),
        ),
        "grad_input": (lambda: g @ w, lambda: (g[:SLICE].float() @ w.float(),)),
        "grad_weight": (lambda: g.T @ x, lambda: (g[:, :SLICE].float().T @ x.float(),)),
    }
    for case, (run, expected) in cases.items():
        yield Operation(case, "bf16", run, expected, HIGH, work)


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
        part=lambda result: [part[:SLICE] for part in result],
        expected=lambda: reference.quantize(x[:SLICE], forward, "rowwise"),
        work=3 * x.numel(),
    )
    yield operation(
        "quantize_g",
        run=lambda: ops.quantize_rows_and_sum(g, backward),
        part=lambda result: (result[0][:SLICE], result[1][:SLICE], result[2]),
        expected=lambda: (
            *reference.quantize(g[:SLICE], backward, "rowwise"),
            g.float().sum(dim=0),
        ),
        work=3 * g.numel(),
    )
    yield operation(
        "quantize_w",
        run=lambda: ops.quantize(w, forward, "tensorwise", layout="both"),
        part=tuple,
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
    high = torch.bfloat16
    products = {
        "output": (x_q, w_q, x_scale, bias),
        "grad_input": (g_q, w_q_transposed, g_scale, None),
    }
    for case, (a, b, scale, added) in products.items():

        def run(a=a, b=b, scale=scale, added=added) -> Tensor:
            return ops.matmul(a, b, scale, w_scale, added, high)

        def expected(a=a, b=b, scale=scale, added=added) -> tuple[Tensor]:
            return (reference.matmul(a[:SLICE], b, scale[:SLICE], w_scale, added, high),)

        most, work = EXACT if dtype == "int8" else FP8, 2 * a.shape[0] * b.numel()
        yield Operation(case, dtype, run, expected, most, work)


def _products_of_torch(x: Tensor, w: Tensor, g: Tensor) -> Iterator[Operation]:
    """`torch._int_mm`, which leaves int32 sums, and `torch._scaled_mm` with both scalings."""
    for case, a, b, format in (("output", x, w, "e4m3"), ("grad_input", g, w.T, "e5m2")):
        yield _int_mm(case, a, b)
        for granularity in ("rowwise", "tensorwise"):
            yield _scaled_mm(case, a, b, format, granularity)


def _int_mm(case: str, a: Tensor, b: Tensor) -> Operation:
    int8 = parse_format("int8")
    a_q, b_q = (reference.quantize(t, int8, "tensorwise")[0].contiguous() for t in (a, b))

    def expected() -> tuple[Tensor]:
        return (a_q[:SLICE].double() @ b_q.double().T,)

    name, work = f"{case}, torch._int_mm", 2 * a.shape[0] * b.numel()
    return Operation(name, "int8", lambda: torch._int_mm(a_q, b_q.T), expected, 0.0, work)


def _scaled_mm(case: str, a: Tensor, b: Tensor, format: str, granularity: str) -> Operation:
    """One scale for each row of both operands, or for each whole operand."""
    a_q, a_scale = reference.quantize(a, parse_format(format), granularity)
    b_q, b_scale = reference.quantize(b, parse_format("e4m3"), granularity)
    b_q, high = b_q.contiguous(), torch.bfloat16

    def run() -> Tensor:
        return torch._scaled_mm(a_q, b_q.T, a_scale, b_scale.T, out_dtype=high, use_fast_accum=True)

    def expected() -> tuple[Tensor]:
        return (reference.matmul(a_q[:SLICE], b_q, a_scale[:SLICE], b_scale, None, high),)

    name, work = f"{case}, torch._scaled_mm {granularity}", 2 * a.shape[0] * b.numel()
    return Operation(name, "fp8", run, expected, FP8, work)


if __name__ == "__main__":
    run_command(main, "benchmark", OpsConfig)
