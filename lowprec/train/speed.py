"""What a step costs in arithmetic, how much of the GPU's it takes, and a trace of some steps."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

PEAK_FLOPS = (  # part of the device's name: dense 16-bit operations a second, by its data sheet
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("A100", 312e12),
)
SKIPPED, WARMED, TRACED = 3, 2, 3  # steps before the trace, while it warms up, and in it


def flops_per_pair(model: nn.Module, pixels: int, tokens: int) -> int:
    """Operations of forward and backward for one pair: three times the forward's products.

    `model` is on the meta device; `pixels` a side, `tokens` a caption. Recomputation is not
    counted, nor what is not a product (so it is the *model's* arithmetic, whatever the recipe).
    """
    images = torch.zeros(2, 3, pixels, pixels, device="meta")
    captions = torch.zeros(2, tokens, dtype=torch.int64, device="meta")
    model.train()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images, captions)
    return 3 * counter.get_total_flops() // 2


def peak_flops(device: torch.device) -> float | None:
    """Dense 16-bit operations a second of a device; None if it is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in PEAK_FLOPS if part in name), None)


class Speed:
    """How fast steps are, in pairs and in arithmetic; `flops`: of a pair, None: not known."""

    def __init__(self, batch_size: int, num_ranks: int, device: torch.device, flops: int | None):
        self.batch_size, self.num_ranks = batch_size, num_ranks
        self.device, self.flops = device, flops
        self.peak = peak_flops(device)

    def of(self, steps_per_s: float) -> dict:
        """Images a second, of all ranks and of one; share of the peak; memory of this device."""
        rate = steps_per_s * self.batch_size
        known = self.peak is not None and self.flops is not None
        on_gpu = self.device.type == "cuda"
        return {
            "images_per_s": round(rate, 1),
            "images_per_s_per_gpu": round(rate / self.num_ranks, 1),
            "mfu": round(rate * self.flops / self.num_ranks / self.peak, 4) if known else None,
            "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        }


class Tracer:
    """Writes a Chrome trace of a few steps to `traces/<attempt>.json` in a run, if it is wanted.

    An attempt that ends before SKIPPED + WARMED + TRACED steps leaves none.
    """

    def __init__(self, wanted: bool, run: Path, attempt: int):
        self._profiler = None
        if not wanted:
            return
        path = run / "traces" / f"{attempt:04d}.json"
        path.parent.mkdir(exist_ok=True)
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=SKIPPED, warmup=WARMED, active=TRACED, repeat=1),
            on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
        )
        self._profiler.start()

    def step(self) -> None:
        """Marks the end of a step."""
        if self._profiler is not None:
            self._profiler.step()
