"""How the benchmarks of layers and operations time a call and write a line of it."""

import importlib.metadata
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from lowprec.runs.environment import environment
from lowprec.runs.read import encode_row

CACHE_BYTES = 256 * 2**20  # more than the second-level cache of any GPU holds


def reporter(run_dir: str, slug: str, packages: tuple[str, ...] = ()) -> Callable:
    """A function that writes a measurement to `run_dir/bench/<slug>/<time>.jsonl` and the console.

    `packages`: whose versions a line names beside the project's own. A measurement that was skipped
    has neither `ms` nor `rate`, `correct` is None, and `reason` says why; one that was found wrong
    has `correct` False.
    """
    facts = environment()
    versions = facts["packages"] | {name: _version(name) for name in packages}
    folder = Path(run_dir) / "bench"
    name = f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"

    def report(
        case: str,
        shape: str,
        dtype: str,
        ms: float | None = None,
        rate: float | None = None,
        ratio_to: str | None = None,
        ratio: float | None = None,
        correct: bool | None = None,
        kind: str = slug,
        **more: object,
    ) -> None:
        row = {
            "slug": kind,
            "device": facts["gpu"] or facts["cpu"],
            "versions": versions,
            "commit": facts["commit"],
            "case": case,
            "shape": shape,
            "dtype": dtype,
            "ms": ms and round(ms, 5),
            "rate": rate and float(f"{rate:.5g}"),
            "ratio_to": ratio_to,
            "ratio": ratio and round(ratio, 4),
            "correct": correct,
            **more,
        }
        out = folder / kind / name
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "a") as file:
            file.write(encode_row(row))
        print(encode_row(row), end="", flush=True)

    return report


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def reason_of(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def median_ms(call: Callable, device: object, repeats: int, *, cold: bool = False) -> float:
    """Median milliseconds of a call after a warm-up: CUDA events, on a CPU its clock.

    `cold`: the cache of a GPU is emptied before each call. This also hides what the host takes to
    launch, so only a call that is one launch (a CUDA graph) may ask for it.
    """
    import torch

    for _ in range(max(3, repeats // 5)):
        call()
    if device.type != "cuda":
        return statistics.median(_clock_ms(call) for _ in range(repeats))
    flushed = torch.empty(CACHE_BYTES, dtype=torch.int8, device=device) if cold else None
    events = []
    for _ in range(repeats):
        if cold:
            flushed.zero_()
        events.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
        events[-1][0].record()
        call()
        events[-1][1].record()
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events)


def _clock_ms(call: Callable) -> float:
    start = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - start)


def graphed(call: Callable) -> Callable:
    """The call as a CUDA graph: launches it again with the same tensors."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def relative_error(value: object, expected: object) -> float:
    """`|value - expected| / |expected|` of two tensors, by the Euclidean norm."""
    expected = expected.float()
    return ((value.float() - expected).norm() / expected.norm()).item()
