"""A small model and a run of it as words of a command, and `python`, which runs one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODEL = {"vision_width": 64, "vision_layers": 1, "text_width": 64, "text_layers": 1}
MODEL |= {"vocab_size": 512}
WORDS = (*(f"model.{name}={value}" for name, value in MODEL.items()), "device=cpu")
WORDS += ("precision=fp32",)


def python(*words, cwd=ROOT, timeout=280, **environment):
    """The ended process of `python *words`, for which the project is on the path."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **environment}
    options = {"cwd": cwd, "env": os.environ | own, "timeout": timeout}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, **options)
