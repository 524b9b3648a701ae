"""Changes one operator or comparison at a time in four modules: their tests should fail.

    python tests/mutants.py [COUNT [SEED]]      (make mutants)

Tries COUNT changes of each module, drawn by SEED, in a copy of the project. Exits 1 if one
survives, which may be right: some changes change nothing.
"""

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODULES = {  # module: its tests
    "lowprec/optim/adamw_update.py": ["optim/test_stable_adamw.py", "optim/test_contract.py"],
    "lowprec/train/checkpoint.py": ["train/test_checkpoint.py", "train/test_saver.py"],
    "lowprec/data/index.py": ["data/test_index.py", "data/test_tar.py"],
    "lowprec/diagnostics/spikes.py": ["diagnostics/test_spikes.py"],
}
SWAPS = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.And: ast.Or, ast.Or: ast.And, ast.In: ast.NotIn, ast.NotIn: ast.In},
}


def mutated(source: str, dice: random.Random) -> tuple[str, str]:
    """The changed expression, after its line number, and the source with it."""
    tree = ast.parse(source)
    fields = [("op", node) for node in ast.walk(tree) if type(getattr(node, "op", 0)) in SWAPS]
    fields += [("ops", node) for node in ast.walk(tree) if isinstance(node, ast.Compare)]
    name, node = dice.choice(fields)
    if name == "op":
        node.op = SWAPS[type(node.op)]()
    else:
        node.ops[0] = SWAPS[type(node.ops[0])]()
    return f"{node.lineno}: {ast.unparse(node)}", ast.unparse(tree)


def main(count: int = 5, seed: int = 0) -> int:
    """Prints each change with its fate; returns 1 if one survived."""
    survived, dice = 0, random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "project")
        for part in ("analysis", "conf", "experiments", "lowprec", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("results"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        for module, tests in MODULES.items():
            words = [*command, *(f"tests/{name}" for name in tests)]
            run = partial(subprocess.run, words, cwd=copy, env=environment, capture_output=True)
            if run().returncode:
                sys.exit(f"the tests of {module} fail without a change")
            for _ in range(count):
                change, source = mutated((ROOT / module).read_text(), dice)
                (copy / module).write_text(source)
                code = run().returncode
                survived += code == 0
                print(f"{'noticed ' if code else 'SURVIVES'}  {module}:{change}", flush=True)
            shutil.copy(ROOT / module, copy / module)
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
