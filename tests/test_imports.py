"""The import contracts of .importlinter, and what a refused command must not load."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def test_packages_keep_the_import_contracts():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


def test_importing_loads_no_torch():
    modules = ["experiments.train", "experiments.replay", "experiments.sweep", "analysis.make"]
    modules += ["experiments.benchmarks.__main__", "analysis.spikes", "analysis.report.__main__"]
    modules += ["lowprec.nn.recipe", "lowprec.runs.record"]
    code = f"""
import importlib, sys
for module in {modules}:
    importlib.import_module(module)
    assert "torch" not in sys.modules, module
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=60)
