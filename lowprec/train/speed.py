"""Arithmetic cost of a model, throughput as a share of the GPU's peak, and traces of some steps."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

PEAK_FLOPS = (  # part of the device's name: dense 16-bit operations per second, from its data sheet
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("A100", 312e12),
)
SKIPPED, WARMED, TRACED = 3, 2, 3  # steps before the trace, while it warms up, and in it


def flops_per_pair(model: nn.Module, pixels: int, tokens: int) -> int:
    """Counts the operations of forward and backward for one pair: 3 times those of the forward.

    Only matrix products count, and recomputation does not: the count is a property of the model,
    whatever the recipe.

    Args:
        model: on the meta device.
        pixels: side of an image.
        tokens: length of a caption.
    """
    images = torch.zeros(2, 3, pixels, pixels, device="meta")
    captions = torch.zeros(2, tokens, dtype=torch.int64, device="meta")
    model.train()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images, captions)
    return 3 * counter.get_total_flops() // 2


def peak_flops(device: torch.device) -> float | None:
    """Returns the dense 16-bit operations per second of a device; None if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in PEAK_FLOPS if part in name), None)


class Speed:
    """Converts steps per second to throughput; `flops` are those of a pair, None if unknown."""

    def __init__(self, batch_size: int, num_ranks: int, device: torch.device, flops: int | None):
        self.batch_size, self.num_ranks = batch_size, num_ranks
        self.device, self.flops = device, flops
        self.peak = peak_flops(device)

    def of(self, steps_per_s: float) -> dict:
        """Returns images per second of all ranks and of one, MFU, and this device's peak memory."""
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
    """Writes a Chrome trace of a few steps to `traces/<attempt>.json` of a run, if enabled.

    An attempt that ends before SKIPPED + WARMED + TRACED steps leaves none.
    """

    def __init__(self, enabled: bool, run: Path, attempt: int):
        self._profiler = None
        if not enabled:
            return
        path = run / "traces" / f"{attempt:04d}.json"
        path.parent.mkdir(exist_ok=True)
        self._profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=SKIPPED, warmup=WARMED, active=TRACED, repeat=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(str(path)),
        )
        self._profiler.start()

    def step(self) -> None:
        """Marks the end of a step."""
        if self._profiler is not None:
            self._profiler.step()
