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

    Threads and GPU are those of torch, if the process has imported it.
    """
    return {
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "commit": commit(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        **_torch_facts(),
    }


def package_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(digits: int = 12) -> str | None:
    """The commit of the source tree, with "-dirty" if tracked files differ; None outside git.

    Records made before this convention have "+" in place of "-dirty".
    """
    describe = ["git", "describe", "--always", "--dirty", f"--abbrev={digits}", "--exclude=*"]
    try:
        done = subprocess.run(
            describe, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _torch_facts() -> dict:
    torch = sys.modules.get("torch")
    if torch is None:
        return {"threads": None, "torch_cuda": None, "gpu": None}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"threads": torch.get_num_threads(), "torch_cuda": torch.version.cuda, "gpu": gpu}
