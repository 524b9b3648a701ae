"""Times one linear layer, forward and backward, by recipe, beside nn.Linear and other libraries.

    python -m experiments.benchmarks.layer
    python -m experiments.benchmarks.layer dims=[1280] cases=[switchback,torchao_int8] graphs=false

Each dim is measured as dim -> 4 dim, as 4 dim -> dim and as their sum, with a bias, random inputs,
eager and as a CUDA graph. A case counts only if output and gradients lie as close to nn.Linear's as
its formats allow, no closer, and if ours equals its definition in plain torch, with bf16 weights
and with float32 weights under autocast. Otherwise its line has no number and says why, as does the
line of a peer that does not run. One JSON line a measurement goes to
`runs/bench/layer/<time>.jsonl`, memory to `runs/bench/layer_memory/`.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from experiments.benchmarks.peers import PACKAGES, PEERS
from experiments.benchmarks.report import graphed, median_ms, reason_of, reporter
from experiments.entry import run_command
from lowprec.config.schema import key

OURS = (
    *("autograd_high", "switchback", "switchback_m", "switchback_q", "llm_int8"),
    *("hw_fp8_tensorwise", "hw_fp8_switchback"),
)
CASES = ("linear", "linear_compiled", *OURS, *PEERS)
MIB = 2**20


@dataclass
class BenchLayerConfig:
    """What is measured, and how often."""

    dims: list[int] = key([768, 1024, 1280, 2048, 4096], "widths of the layer", least=1)
    tokens: int = key(32768, "rows of the input", least=1)
    cases: list[str] = key(list(CASES), "what is measured beside linear", choices=CASES)
    graphs: bool = key(True, "also as CUDA graphs, on a GPU")
    repeats: int = key(50, "calls of which the median is kept", least=1)
    device: str = key("auto", "where", choices=("auto", "cpu", "cuda"))
    run_dir: str = key("runs", "the lines go into its bench/layer and bench/layer_memory")


def main(config: BenchLayerConfig) -> None:
    """Measures every dim; exits with 1 if one of ours was wrong or failed."""
    from lowprec.train.build import pick_device

    device = pick_device(config.device)
    report = reporter(config.run_dir, "layer", PACKAGES)
    failed = [case for dim in config.dims for case in bench_dim(config, dim, device, report)]
    if failed:
        sys.exit(f"no number for {', '.join(failed)}; their lines say why")


def bench_dim(config: BenchLayerConfig, dim: int, device: object, report: Callable) -> list[str]:
    """All cases of one dim in both directions and summed; returns which of ours failed."""
    from experiments.benchmarks.problem import Problem, Shape

    shapes = [Shape(config.tokens, *pair) for pair in ((dim, 4 * dim), (4 * dim, dim))]
    modes = ["eager", "graph"] if config.graphs and device.type == "cuda" else ["eager"]
    cases = ["linear", *(case for case in config.cases if case != "linear")]
    lines = Lines(report, {"dim": dim, "tokens": config.tokens})
    for shape, direction in zip(shapes, ("up", "down"), strict=True):
        problem = Problem(shape, device)
        for case in cases:
            bench_case(problem, case, modes, config.repeats, lines, direction)
        del problem  # before the next one takes its memory
    for case in cases:
        for mode in modes:
            lines.write_time(case, mode, shapes, "both")
        lines.write_memory(case, shapes, "both")
    return [f"{case} at {dim}" for case in lines.failed]


def bench_case(
    problem: object, case: str, modes: list, repeats: int, lines: "Lines", direction: str
) -> None:
    """Checks, then times a case; writes its lines, or one that says why it has no number."""
    from experiments.benchmarks.problem import Unable, Wrong

    shape, mode = problem.shape, modes[0]
    try:
        step = problem.checked_step(case)
        for mode in modes:
            call = graphed(step) if mode == "graph" else step
            lines.ms[case, mode, shape] = median_ms(call, problem.device, repeats)
            del call  # a graph keeps its memory
            lines.write_time(case, mode, [shape], direction)
        if case == "linear" or case in OURS:
            lines.memory[case, shape] = (step.saved_bytes(), step.peak_bytes())
            lines.write_memory(case, [shape], direction)
    except Exception as error:
        wrong = isinstance(error, Wrong)
        lines.skip(case, mode, shape, direction, reason_of(error), wrong)
        if case not in PEERS and not isinstance(error, Unable):
            lines.failed.append(case)


class Lines:
    """What was measured of one dim, and the lines of it."""

    def __init__(self, report: Callable, about: dict):
        self.report, self.about = report, about
        self.ms: dict[tuple, float] = {}  # case, mode, shape
        self.memory: dict[tuple, tuple[int, int]] = {}  # case, shape: saved, peak
        self.failed: list[str] = []  # cases of ours

    def write_time(self, case: str, mode: str, shapes: list, direction: str) -> None:
        """The time over some shapes beside nn.Linear's; nothing if one of them has none."""
        if any((some, mode, shape) not in self.ms for some in (case, "linear") for shape in shapes):
            return
        ms = sum(self.ms[case, mode, shape] for shape in shapes)
        base = sum(self.ms["linear", mode, shape] for shape in shapes)
        rate = sum(shape.operations for shape in shapes) / ms / 1e9
        self.report(
            case, _joined(shapes), _dtype(case), ms, rate, f"linear, {mode}", base / ms, True,
            mode=mode, direction=direction, rate_unit="TFLOP/s", **self.about,
        )  # fmt: skip

    def write_memory(self, case: str, shapes: list, direction: str) -> None:
        """What the forward saves and the peak over some shapes, beside nn.Linear's."""
        if any((some, shape) not in self.memory for some in (case, "linear") for shape in shapes):
            return
        saved, peak, base, base_peak = (
            sum(self.memory[some, shape][which] for shape in shapes)
            for some in (case, "linear")
            for which in (0, 1)
        )
        self.report(
            case, _joined(shapes), _dtype(case), ratio_to="linear", ratio=saved / base,
            correct=True, kind="layer_memory", saved_mib=round(saved / MIB, 4),
            peak_mib=round(peak / MIB, 4) if peak else None,
            peak_ratio=round(peak / base_peak, 4) if peak else None,
            direction=direction, **self.about,
        )  # fmt: skip

    def skip(
        self, case: str, mode: str, shape: object, direction: str, reason: str, wrong: bool
    ) -> None:
        """A line without a number."""
        correct = False if wrong else None
        self.report(
            case, str(shape), _dtype(case), correct=correct, reason=reason, mode=mode,
            direction=direction, **self.about,
        )  # fmt: skip


def _joined(shapes: list) -> str:
    return " + ".join(map(str, shapes))


def _dtype(case: str) -> str:
    return PEERS[case].dtype if case in PEERS else "bf16"


if __name__ == "__main__":
    run_command(main, "bench_layer", BenchLayerConfig)
