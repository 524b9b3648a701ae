"""What a run ran on: versions, devices, threads, commit. Torch-free until it is asked of."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = ("torch", "triton", "open_clip_torch", "hydra-core", "numpy", "pyarrow", "pillow")


def environment() -> dict:
    """Plain data; only what is named here, never the process's environment variables."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        **_torch_facts(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the source tree, with `+` when it was changed since; None outside git."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "-C", here, "rev-parse", "--short=12", "HEAD"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        change = subprocess.run(
            ["git", "-C", here, "status", "--porcelain", "--untracked-files=no"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if change.stdout.strip() else "")


def _cpu() -> str:
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    )
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _torch_facts() -> dict:
    import torch

    facts = {"threads": torch.get_num_threads(), "torch_cuda": torch.version.cuda, "gpu": None}
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts
