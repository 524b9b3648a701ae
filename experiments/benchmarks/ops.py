"""Times each operation of a linear layer alone: quantizing and multiplying, 8 bit and 16 bit.

    python -m experiments.benchmarks.ops
    python -m experiments.benchmarks.ops dims=[1280] tokens=[16384,65536]

Each dim is measured as dim -> 4 dim ("up") and 4 dim -> dim ("down"), on random numbers; on a GPU
as a CUDA graph whose inputs are not in the cache. An operation counts only if a slice of its rows
equals the definition in plain torch. One JSON line a measurement goes to
`runs/bench/ops/<time>.jsonl`, and to the console.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from experiments.benchmarks.report import graphed, median_ms, reason_of, reporter
from experiments.entry import run_command
from lowprec.config.schema import key


@dataclass
class BenchOpsConfig:
    """What is measured, and how often."""

    dims: list[int] = key([768, 1024, 1280, 1408, 1664, 2048, 4096], "widths", least=1)
    tokens: list[int] = key([32768], "rows of the input", least=1)
    repeats: int = key(50, "calls of which the median is kept", least=1)
    device: str = key("auto", "where", choices=("auto", "cpu", "cuda"))
    run_dir: str = key("runs", "the lines go into its bench/ops")


def main(config: BenchOpsConfig) -> None:
    """Measures every size; exits with 1 if one of ours was wrong or failed."""
    from lowprec.train.build import pick_device

    device = pick_device(config.device)
    report = reporter(config.run_dir, "ops")
    failed = [
        f"{case} at {dim}"
        for tokens in config.tokens
        for dim in config.dims
        for direction, pair in (("up", (dim, 4 * dim)), ("down", (4 * dim, dim)))
        for case in bench_shape((tokens, *pair), direction, config.repeats, device, report)
    ]
    if failed:
        sys.exit(f"no number for {', '.join(failed)}; their lines say why")


def bench_shape(
    shape: tuple, direction: str, repeats: int, device: object, report: Callable
) -> list[str]:
    """Every operation of one layer; returns which of ours failed.

    The ratio of a product is to the 16-bit one, which comes first.
    """
    from experiments.benchmarks.operations import Wrong, operations

    name, failed, bases = "x".join(map(str, shape)), [], {}
    about = {"dim": min(shape[1:]), "tokens": shape[0], "direction": direction}
    for operation in operations(*shape, device):
        case, dtype, unit = operation.case, operation.dtype, operation.unit
        try:
            operation.check()
            ms = _time(operation.run, device, repeats)
        except Exception as error:
            correct = False if isinstance(error, Wrong) else None
            report(case, name, dtype, correct=correct, reason=reason_of(error), **about)
            if not operation.is_peer:
                failed.append(f"{case} {dtype}")
            continue
        product = case.partition(",")[0]  # of a peer too
        bases |= {product: ms} if dtype == "bf16" else {}
        base = bases.get(product)
        rate = operation.work / ms / {"TFLOP/s": 1e9, "GB/s": 1e6}[unit]
        report(
            case, name, dtype, ms, rate, f"{product}, bf16" if base else None,
            base / ms if base else None, True, rate_unit=unit, **about,
        )  # fmt: skip
    return failed


def _time(run: Callable, device: object, repeats: int) -> float:
    if device.type != "cuda":
        return median_ms(run, device, repeats)
    return median_ms(graphed(run), device, repeats, cold=True)


if __name__ == "__main__":
    run_command(main, "bench_ops", BenchOpsConfig)
