"""Describes what a run ran on: versions, devices, threads, commit. Loads no torch by itself."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

PACKAGES = ("torch", "triton", "open_clip_torch", "hydra-core", "numpy", "pyarrow", "pillow")


def environment() -> dict:
    """Describes this process as plain data; the process's environment variables are left out.

    Threads and GPU are torch's, None if the process has not imported it.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "commit": commit(),
        "cpu": (models or [platform.processor()])[0],
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch and torch.get_num_threads(),
        "torch_cuda": torch and torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if has_gpu else None,
    }


def package_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(digits: int = 12) -> str | None:
    """The commit of the source tree, with "-dirty" if tracked files differ; None outside git."""
    describe = ["git", "describe", "--always", "--dirty", f"--abbrev={digits}", "--exclude=*"]
    try:
        done = subprocess.run(
            describe, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
