"""The import contracts of .importlinter, what a refused command must not load, and the wheel."""

import importlib
import os
import shutil
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from experiments.train import hidden
from lowprec import startup
from tests.small import ROOT, python

SMOKE = Path(__file__).with_name("smoke.py")


def test_importing_and_refusing_a_path_load_no_torch(tmp_path):
    modules = ["experiments.train", "experiments.replay", "experiments.sweep", "analysis.make"]
    modules += ["experiments.benchmarks.__main__", "analysis.spikes", "analysis.report.__main__"]
    modules += ["lowprec.nn.recipe", "lowprec.runs.record"]
    code = f"""
import importlib, runpy, sys
for module in {modules}:
    importlib.import_module(module)
    assert "torch" not in sys.modules, module
for entry, keys in (("evaluate", "run="), ("export", "out=x source=")):
    for path in ("nano-1", "nano-*", "x/y"):
        sys.argv[1:] = f"{{keys}}{tmp_path}/{{path}}".split()
        try:
            runpy.run_module(f"experiments.{{entry}}", run_name="__main__", alter_sys=True)
        except SystemExit as refused:
            print("status", refused.code)
        assert "torch" not in sys.modules, entry
"""
    (tmp_path / "nano-0").mkdir()
    done = python("-c", code)
    assert done.returncode == 0 and done.stdout == "status 2\n" * 6, done.stderr
    for hint, num in ((f"nearest: {tmp_path}/nano-0", 4), ("has no similar name", 2)):
        assert done.stderr.count(hint) == num, done.stderr


def test_training_leaves_out_what_open_clip_imports_for_models_that_are_refused(tmp_path):
    for name in ("timm", "transformers", "wandb"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(3)")
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "CUDA_VISIBLE_DEVICES": ""}
    done = python("-m", "experiments.train", "device=cuda", cwd=tmp_path, **paths)
    assert done.returncode == 2 and "torch finds no GPU" in done.stderr, done.stderr


def test_hidden_packages_can_be_imported_afterwards_and_loaded_ones_stay(monkeypatch):
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with hidden("this", "os"):
        with pytest.raises(ImportError):
            importlib.import_module("this")
        assert importlib.import_module("os") is os
    assert importlib.import_module("this").s


@pytest.mark.parametrize(
    ("command", "module", "error", "line"),
    [
        ("experiments.train", "rich", "ModuleNotFoundError(name='rich')", "needs rich, which is"),
        ("analysis.make", "pandas", "ModuleNotFoundError(name='pandas')", "needs pandas, which"),
        ("experiments.train", "rich", "KeyboardInterrupt", "Interrupted."),
        ("experiments.train", "rich", "ModuleNotFoundError(name='lowprec.x')", "Traceback"),
        ("another.command", "pandas", "ModuleNotFoundError(name='pandas')", "Traceback"),
    ],
)
def test_a_missing_package_and_an_early_ctrl_c_are_one_line(tmp_path, command, module, error, line):
    (tmp_path / f"{module}.py").write_text(f"raise {error}")
    (tmp_path / "another").mkdir()
    (tmp_path / "another" / "__init__.py").write_text("import analysis")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = python("-m", command, cwd=tmp_path, PYTHONPATH=paths)
    first, *rest = done.stderr.strip().splitlines()
    assert done.returncode and first.startswith(line) and bool(rest) == (line == "Traceback")


def test_the_library_without_triton_says_what_it_needs():
    code = """
import importlib, importlib.util, sys, torch
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find(name, *rest)
sys.modules |= dict.fromkeys(("triton", "triton.language"))
for module in ("nn.linear", "nn.replace", "nn.advice", "optim", "ops", "diagnostics.monitor"):
    try:
        importlib.import_module(f"lowprec.{module}")
    except ImportError as error:
        print(error)
"""
    done = python("-c", code)
    said = "lowprec needs triton, which pip installs on Linux only\n"
    assert done.stdout == 6 * said, (done.stdout, done.stderr)


LIBRARY = """
import importlib, pathlib, runpy, sys
from importlib.machinery import PathFinder

absent, find = {absent}, PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: (
    None if name.partition(".")[0] in absent else find(name, *rest)
)
importlib.import_module("lowprec.nn.blocks")  # first: it names ops that another module registers
for lacks_pyarrow in (True, False):
    for path in pathlib.Path("lowprec").rglob("*.py"):
        if "runs" in path.parts and lacks_pyarrow:
            continue
        importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    if lacks_pyarrow:  # compiling loads it, and lowprec.runs loads no torch
        assert "torch.distributed.tensor" not in sys.modules  # takes a second
    importlib.metadata.version = lambda name: "of the checkout"
    torch = importlib.import_module("torch")
    compiled = torch.compile
    eager = dict(backend="eager")  # with C++ it takes a minute
    torch.compile = lambda *args, **options: compiled(*args, **options | eager)
    saved = runpy.run_path({smoke!r})["saved"]
    assert ("pyarrow" in saved) == lacks_pyarrow, saved
    torch.compile = compiled
    absent.discard("pyarrow")
"""


def test_the_wheel_works_without_the_harness(tmp_path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for name in project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy(ROOT / name, tmp_path / name)
    own, harness = project["project"]["dependencies"] + requires("torch"), {"experiments"}
    own = {Requirement(line).name.lower() for line in own}
    of_harness = project["project"]["optional-dependencies"]["harness"]
    of_harness = {Requirement(line).name.lower() for line in of_harness} - own
    for module, packages in packages_distributions().items():
        if of_harness & {name.lower() for name in packages}:
            harness.add(module)
    assert {"hydra", "open_clip", "pandas", "plotly", "webdataset"} < harness
    code = LIBRARY.format(absent=harness | {"analysis"}, smoke=str(SMOKE))
    done = python("-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_threads_of_a_command_do_not_spin_unless_told(monkeypatch):
    for given, used in ((None, "passive"), ("active", "active")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if given:
            monkeypatch.setenv("OMP_WAIT_POLICY", given)
        importlib.reload(startup)
        assert os.environ["OMP_WAIT_POLICY"] == used
