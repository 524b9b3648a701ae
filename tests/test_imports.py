"""The import law of lowprec, kept by walking the syntax tree of every module."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
# modules, not folders
FOUNDATION = {
    *("config", "nearest", "rules", "validate", "run", "durable", "record", "environment"),
}

ALLOWED = {  # room: rooms of the project that it may import (itself always)
    "config": set(),
    "nearest": set(),
    "rules": {"config", "nearest", "nn.recipe"},
    "validate": {"config", "nearest", "rules"},
    "run": {"config", "validate"},
    "durable": set(),
    "record": {"run", "durable"},
    "environment": set(),
    "formats": set(),
    "ops": {"formats"},
    "optim": {"ops", "formats"},
    "diagnostics": {"ops", "formats"},
    "diagnostics.spikes": set(),
    "data": set(),
    "evaluate": set(),
    "nn": {"ops", "formats", "nearest"},
    "nn.recipe": set(),
    "clip": {"nn", "ops", "formats", "config"},
    "train": {"optim", "data.loader", "diagnostics", "config", "run", "record", "durable"},
    "sweep": {"config", "validate", "run", "durable", "diagnostics.spikes"},
    "analysis": {"config", "validate", "run", "diagnostics.spikes", "sweep"},
    "experiments": {"*"},
}
OUTSIDE = {  # room: the only packages beyond the standard library; others import what they need
    "config": set(),
    "nearest": set(),
    "rules": set(),
    "nn.recipe": set(),
    "validate": set(),
    "run": {"numpy", "pyarrow"},
    "record": {"numpy", "pyarrow"},
    "durable": set(),
    "environment": set(),
    "diagnostics.spikes": {"numpy"},
    "sweep": {"numpy", "pyarrow", "submitit"},
}
OWNERS = {  # package: the rooms that may import it
    "open_clip": {"clip"},
    "timm": {"clip"},
    "torchvision": {"clip"},
    "hydra": {"experiments"},
    "omegaconf": {"experiments"},
}
TORCH = {"torch", "triton", "safetensors.torch", "torchvision", "open_clip", "timm"}
ROOMS_WITHOUT_TORCH = {"analysis", "sweep", "diagnostics.spikes", "nn.recipe", *FOUNDATION}
LATE_TORCH = {"environment"}  # may import it inside a function


def room_of(module):
    """`lowprec.data.index` is in the room `data`; a room named with a dot is one module."""
    parts = module.split(".")
    if parts[0] != "lowprec":
        return parts[0]
    dotted = ".".join(parts[1:3])
    return dotted if dotted in ALLOWED else ".".join(parts[1:2])


def imports_of(source, module, is_package=False):
    """(imported module, is at module level) of every import, those inside functions too."""
    tree = ast.parse(source)
    late = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: len(module.split(".")) - node.level + is_package]
            base = ".".join([*package, *filter(None, [node.module])]) if node.level else node.module
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name, id(node) not in late) for name in names)


def matches(name, allowed):
    return any(name == item or name.startswith(f"{item}.") for item in allowed)


def breaches(source, module, is_package=False):
    """What the imports of one module break, in words."""
    room = room_of(module)
    for name, at_module_level in imports_of(source, module, is_package):
        top = name.split(".")[0]
        if top in ("lowprec", "experiments", "analysis"):
            inside = top if top != "lowprec" else name.removeprefix("lowprec.")
            permitted = ALLOWED[room] | {room}
            if "*" not in permitted and not matches(inside, permitted):
                yield f"{module}: {room} may not import {name}"
            continue
        if room not in OWNERS.get(top, {room}):
            yield f"{module}: only {', '.join(OWNERS[top])} may import {top}"
        if room in ROOMS_WITHOUT_TORCH and matches(name, TORCH):
            if at_module_level or room not in LATE_TORCH:
                yield f"{module}: {room} must not import {name}"
        elif room in OUTSIDE and at_module_level:
            if not (top in sys.stdlib_module_names or top in OUTSIDE[room]):
                yield f"{module}: {room} must not import {top}"


FILES = [
    str(path.relative_to(REPOSITORY))
    for package in ("lowprec", "experiments", "analysis")
    for path in sorted((REPOSITORY / package).rglob("*.py"))
]


def module_of(file):
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.mark.parametrize("file", [file for file in FILES if file != "lowprec/__init__.py"])
def test_module_keeps_the_import_law(file):
    source = (REPOSITORY / file).read_text()
    found = list(breaches(source, module_of(file), file.endswith("__init__.py")))
    assert not found, "\n".join(found)


RE_EXPORTING = {f"lowprec/{room}/__init__.py" for room in ("optim", "ops", "nn")}


@pytest.mark.parametrize("file", [f for f in FILES if re.match(r"lowprec/.*__init__", f)])
def test_inits_are_empty_so_that_a_torch_free_module_loads_no_torch(file):
    assert file in RE_EXPORTING or not (REPOSITORY / file).read_text()


def test_every_room_has_its_row():
    rooms = {room_of(module_of(file)) for file in FILES if file != "lowprec/__init__.py"}
    assert {"config", "data", "clip", "train", "analysis", "experiments"} <= rooms <= set(ALLOWED)


def test_the_law_has_no_cycle():
    above = {room: {a.split(".")[0] for a in allowed} for room, allowed in ALLOWED.items()}
    above = {room: allowed - {"*", room} for room, allowed in above.items()}
    while above:
        lowest = {room for room, allowed in above.items() if not allowed & set(above)}
        assert lowest, f"cycle among {sorted(above)}"
        above = {room: allowed for room, allowed in above.items() if room not in lowest}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lowprec.config", "import torch"),
        ("lowprec.config", "def f():\n    import numpy.linalg\nimport numpy"),
        ("lowprec.validate", "from lowprec.run import digest"),
        ("lowprec.run", "def f():\n    from torch import nn"),
        ("lowprec.run", "import pandas"),
        ("lowprec.environment", "import torch"),
        ("lowprec.data.index", "from lowprec.clip.tokenizer import Tokenizer"),
        ("lowprec.data.index", "from lowprec import train"),
        ("lowprec.data.index", "from ..train import loop"),
        ("lowprec.data.index", "class A:\n    def f(self):\n        import lowprec.nn.linear"),
        ("lowprec.optim.stable_adamw", "import lowprec.train.loop as loop"),
        ("lowprec.ops.reference", "from lowprec.nn import recipe"),
        ("lowprec.evaluate.metrics", "from lowprec.data.loader import Batch"),
        ("lowprec.train.loop", "from lowprec.clip import model"),
        ("lowprec.train.loop", "from lowprec.data.index import Shards"),
        ("lowprec.train.loop", "import open_clip.model"),
        ("lowprec.train.loop", "from experiments import cli"),
        ("lowprec.train.loop", "if True:\n    import hydra"),
        ("lowprec.clip.model", "from lowprec.optim import schedules"),
        ("lowprec.nn.linear", "import timm"),
        ("lowprec.diagnostics.spikes", "import torch"),
        ("lowprec.diagnostics.spikes", "from lowprec.ops import reference"),
        ("lowprec.sweep.ledger", "import torch"),
        ("analysis.load", "from safetensors.torch import load_file"),
        ("analysis.load", "from lowprec.record import Record"),
        ("analysis.load", "from lowprec.diagnostics.recorder import replay"),
        ("analysis.load", "import omegaconf"),
    ],
)
def test_checker_finds_a_breach(module, source):
    assert list(breaches(source, module))


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("lowprec.config", "from dataclasses import dataclass"),
        (
            "lowprec.run",
            "import numpy as np\nimport pyarrow.ipc\nfrom lowprec.config import Config",
        ),
        ("lowprec.environment", "def f():\n    import torch"),
        ("lowprec.train.loop", "from lowprec.data.loader import Batch\nimport torch"),
        ("lowprec.data.loader", "from .index import Shards"),
        ("lowprec.clip.model", "from lowprec.nn.recipe import RECIPES\nimport open_clip"),
        ("analysis.spikes", "from lowprec.diagnostics.spikes import find"),
        ("experiments.build", "from lowprec.clip.model import build_model\nimport hydra, torch"),
    ],
)
def test_checker_lets_a_lawful_import_pass(module, source):
    assert not list(breaches(source, module))


@pytest.mark.parametrize(
    "module",
    ["lowprec.config", "lowprec.validate", "lowprec.run", "lowprec.record", "lowprec.environment"]
    + ["lowprec.data.index", "lowprec.data.order", "experiments.cli", "experiments.train"]
    + ["experiments.replay"]
    + ["analysis.load", "analysis.make", "analysis.spikes"]
    + ["lowprec.nn.recipe", "lowprec.diagnostics.spikes"]
    + ["experiments.bench_layer", "experiments.bench_ops", "experiments.bench_model"],
)
def test_importing_loads_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'open_clip' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=60)
