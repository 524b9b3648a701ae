"""The operations that `bench_ops` times, each with its definition on a slice of rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from experiments.benchmarks.report import relative_error
from lowprec import ops
from lowprec.formats import parse_format
from lowprec.ops import reference

FORMATS = {"int8": ("int8", "int8"), "fp8": ("e4m3", "e5m2")}  # of x and W, and of g
EXACT, HIGH, FP8 = 1e-3, 1e-2, 2e-2  # relative: rounded in another order; 16-bit sums; fp8 sums
SLICE = 64  # rows of the output that are checked
MULTIPLE = 16  # torch's own 8-bit products take sizes that are


class Wrong(Exception):
    """The numbers of an operation are not what they should be."""


@dataclass(frozen=True)
class Operation:
    """`run()` is what is timed; `part(run())` and `right()` are tensors that should be equal.

    `most`: the relative error allowed. `work`: operations, or bytes read and written, of one run;
    `unit` of work by time.
    """

    case: str
    dtype: str
    run: Callable
    part: Callable
    right: Callable
    most: float
    work: int
    unit: str = "TFLOP/s"

    @property
    def is_peer(self) -> bool:
        """Whether it is another library's."""
        return "," in self.case

    def check(self) -> None:
        """Raises Wrong if the slice is not what its definition says."""
        for found, right in zip(self.part(self.run()), self.right(), strict=True):
            error = relative_error(found, right)
            if not error <= self.most:  # NaN too
                raise Wrong(f"differs by {error:.2g}, at most {self.most:g} expected")


def operations(M: int, K: int, N: int, device: torch.device) -> Iterator[Operation]:
    """Those of a layer [M, K] -> [M, N]: 16 bit, then ours by format, then torch's."""
    torch.manual_seed(0)
    kind = {"dtype": torch.bfloat16, "device": device}
    x_MK, g_MN = torch.randn(M, K, **kind), torch.randn(M, N, **kind)
    w_NK, bias = torch.randn(N, K, **kind) / K**0.5, torch.randn(N, **kind)
    yield from _products_16_bit(x_MK, w_NK, g_MN, bias)
    for dtype, (forward, backward) in FORMATS.items():
        yield from _ours(x_MK, w_NK, g_MN, bias, dtype, forward, backward)
    if not any(size % MULTIPLE for size in (M, K, N)):
        yield from _products_of_torch(x_MK, w_NK, g_MN)


def _first(result: Tensor) -> tuple[Tensor]:
    return (result[:SLICE],)


def _products_16_bit(x: Tensor, w: Tensor, g: Tensor, bias: Tensor) -> Iterator[Operation]:
    """Held against float32."""
    work = 2 * x.shape[0] * w.numel()
    cases = {
        "output": (
            lambda: linear(x, w, bias),
            lambda: (linear(x[:SLICE].float(), w.float(), bias.float()),),
        ),
        "grad_input": (lambda: g @ w, lambda: (g[:SLICE].float() @ w.float(),)),
        "grad_weight": (lambda: g.T @ x, lambda: (g[:, :SLICE].float().T @ x.float(),)),
    }
    for case, (run, right) in cases.items():
        yield Operation(case, "bf16", run, _first, right, HIGH, work)


def _ours(
    x: Tensor, w: Tensor, g: Tensor, bias: Tensor, dtype: str, forward: str, backward: str
) -> Iterator[Operation]:
    """What SwitchBack does in 8 bits, held against `lowprec.ops.reference`."""
    forward, backward = parse_format(forward), parse_format(backward)

    def quantize_x() -> tuple:
        return ops.quantize(x, forward, "rowwise")[::2]

    def quantize_g() -> tuple:
        return ops.quantize_rows_and_sum(g, backward)

    def quantize_w() -> tuple:
        return ops.quantize(w, forward, "tensorwise", layout="both")

    def right_w() -> tuple:
        q, scale = reference.quantize(w, forward, "tensorwise")
        return q, q.float().T, scale

    yield Operation(
        "quantize_x", dtype, quantize_x, lambda result: [part[:SLICE] for part in result],
        lambda: reference.quantize(x[:SLICE], forward, "rowwise"), EXACT, 3 * x.numel(), "GB/s",
    )  # fmt: skip
    yield Operation(
        "quantize_g", dtype, quantize_g,
        lambda result: (result[0][:SLICE], result[1][:SLICE], result[2]),
        lambda: (*reference.quantize(g[:SLICE], backward, "rowwise"), g.float().sum(dim=0)),
        EXACT, 3 * g.numel(), "GB/s",
    )  # fmt: skip
    yield Operation(  # 6 bytes: read for its maximum, read again, written twice
        "quantize_w", dtype, quantize_w, tuple, right_w, EXACT, 6 * w.numel(), "GB/s"
    )
    (x_q, x_scale), (g_q, g_scale, _) = quantize_x(), quantize_g()
    w_q, w_q_transposed, w_scale = quantize_w()
    products = {
        "output": (x_q, w_q, x_scale, w_scale, bias),
        "grad_input": (g_q, w_q_transposed, g_scale, w_scale, None),
    }
    for case, (a, b, a_scale, b_scale, added) in products.items():
        yield _product(case, dtype, a, b, a_scale, b_scale, added)


def _product(case: str, dtype: str, a, b, a_scale, b_scale, bias) -> Operation:
    """Our scaled product; int8 is exact up to the rounding of the output."""
    high = torch.bfloat16
    return Operation(
        case, dtype, lambda: ops.matmul(a, b, a_scale, b_scale, bias, high), _first,
        lambda: (reference.matmul(a[:SLICE], b, a_scale[:SLICE], b_scale, bias, high),),
        EXACT if dtype == "int8" else FP8, 2 * a.shape[0] * b.numel(),
    )  # fmt: skip


def _products_of_torch(x: Tensor, w: Tensor, g: Tensor) -> Iterator[Operation]:
    """`torch._int_mm`, which leaves int32 sums, and `torch._scaled_mm`, by its two scalings."""
    for case, a, b in (("output", x, w), ("grad_input", g, w.T)):
        formats = FORMATS["fp8"] if case == "grad_input" else ("e4m3", "e4m3")
        yield _int_mm(case, a, b)
        for granularity in ("rowwise", "tensorwise"):
            yield _scaled_mm(case, a, b, parse_format(formats[1]), granularity)


def _int_mm(case: str, a: Tensor, b: Tensor) -> Operation:
    int8 = parse_format("int8")
    a_q, b_q = (reference.quantize(t, int8, "tensorwise")[0].contiguous() for t in (a, b))
    return Operation(
        f"{case}, torch._int_mm", "int8", lambda: torch._int_mm(a_q, b_q.T), _first,
        lambda: ((a_q[:SLICE].double() @ b_q.double().T),), 0.0, 2 * a.shape[0] * b.numel(),
    )  # fmt: skip


def _scaled_mm(case: str, a: Tensor, b: Tensor, format: object, granularity: str) -> Operation:
    """Scales of a row of each operand, or of each whole operand."""
    a_q, a_scale = reference.quantize(a, format, granularity)
    b_q, b_scale = reference.quantize(b, parse_format("e4m3"), granularity)
    b_q = b_q.contiguous()

    def run() -> Tensor:
        return torch._scaled_mm(
            a_q, b_q.T, a_scale, b_scale.T, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    def right() -> tuple[Tensor]:
        some = a_scale[:SLICE]
        return (reference.matmul(a_q[:SLICE], b_q, some, b_scale, None, torch.bfloat16),)

    work = 2 * a.shape[0] * b.numel()
    return Operation(
        f"{case}, torch._scaled_mm {granularity}", "fp8", run, _first, right, FP8, work
    )
