"""Prints the files that a batch, a layer, an optimizer step, a figure and a verdict pass through.

    python tests/ways.py

Counts the project's files of which a function runs on the way; imports do not count. Afterwards it
prints the size of the project: lines, statements and the pages.
"""

import ast
import contextlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PRODUCT = ("lowprec", "experiments", "analysis")
RUN = ROOT / "experiments/results/stability_mini/mini_l-bf16-adamw-s2-34a7d6b39f"
STUDY = ROOT / "experiments/results/accuracy_vs_size_mini"


@contextlib.contextmanager
def files_on_the_way(name: str) -> Iterator[None]:
    """Prints the product files whose functions run inside the block."""
    files = set()

    def note(frame: object, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(f"{ROOT}/") and frame.f_code.co_name != "<module>":
            files.add(path.removeprefix(f"{ROOT}/"))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    product = sorted(file for file in files if file.split("/")[0] in PRODUCT)
    print(f"{name}: {len(product)}\n  " + "\n  ".join(product))


def main() -> None:
    """Follows each way once, on the CPU."""
    from analysis import load_runs
    from analysis.claims import CLAIMS, judge
    from analysis.evidence import Evidence
    from analysis.figures import FIGURES
    from lowprec.config.compose import compose_command
    from lowprec.data.open import open_data
    from lowprec.data.shapes import render_shapes
    from lowprec.nn import SwitchBackLinear
    from lowprec.train.build import build

    with tempfile.TemporaryDirectory() as folder:
        render_shapes(Path(folder), num_train=64, num_val=8)
        keys = ["model=nano", "batch_size=16", "num_workers=0", "data=shards", "evaluation=none"]
        keys += [f"data.train={folder}/train-*.tar", f"data.val={folder}/val-*.tar"]
        [run] = compose_command([*keys, "optimizer=stable_adamw"])
        built = build(run.config, open_data(run.config))
        batches = built.batches_from(1)
        next(batches)
        with files_on_the_way("a batch, from shard to loss"):
            loss, _ = built.task.loss(next(batches).to(built.device))
        loss.backward()
    with files_on_the_way("a gradient through the optimizer step"):
        built.state.optimizer.step()
    layer, x = SwitchBackLinear(64, 64), torch.randn(8, 64, requires_grad=True)
    with files_on_the_way("x through a SwitchBack layer and back"):
        layer(x).sum().backward()
    figure = FIGURES["rms_and_loss"]
    with files_on_the_way("a record row to a figure"):
        frame = figure.query(load_runs(RUN))
    assert len(frame)
    records = Evidence([STUDY])
    claim = next(claim for claim in CLAIMS if claim.text.startswith("SwitchBack int8 matches"))
    with files_on_the_way("runs to a verdict"):
        finding = judge(claim, records)
    assert finding.ours
    print_size()


def print_size() -> None:
    """Prints lines and statements of product and tests, and the lines and words of the pages."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = listed.stdout.split()
    for name, folders in (("product", PRODUCT), ("tests", ("tests",))):
        texts = [
            (ROOT / file).read_text()
            for file in files
            if file.endswith(".py") and file.split("/")[0] in folders
        ]
        nodes = (node for text in texts for node in ast.walk(ast.parse(text)))
        statements = sum(isinstance(node, ast.stmt) for node in nodes)
        lines = sum(text.count("\n") for text in texts)
        print(f"{name}: {len(texts)} files, {lines} lines, {statements} statements")
    ends = ("CHANGELOG.md", "RESULTS.md", "claims.md", "KEYS.md")
    pages = [(ROOT / f).read_text() for f in files if f.endswith(".md") and not f.endswith(ends)]
    words = sum(len(page.split()) for page in pages)
    print(f"pages: {len(pages)}, {sum(page.count(chr(10)) for page in pages)} lines, {words} words")


if __name__ == "__main__":
    main()
