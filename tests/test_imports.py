"""The import contracts of .importlinter, and what a refused command must not load."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]


def test_packages_keep_the_import_contracts():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "module",
    ["experiments.train", "experiments.replay", "experiments.sweep", "analysis.make"]
    + ["analysis.spikes", "analysis.report.__main__", "lowprec.nn.recipe", "lowprec.runs.record"],
)
def test_importing_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=60)
