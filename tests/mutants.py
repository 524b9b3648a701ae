"""Breaks resume, recorder and kernels, a line at a time: the tests must notice each time.

    python tests/mutants.py [NAME ...]      (make mutants)

A mutant that survives exits 1: a test that cannot fail is a defect of the tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
TESTS = ("train/test_saver.py", "train/test_checkpoint.py", "runs/test_record.py")
TESTS += ("train/test_snapshots.py",)
TESTS += ("data/test_loader.py", "data/test_index.py", "train/test_crash.py")
KERNEL_TESTS = ("ops/test_quantize.py", "ops/test_matmul.py", "ops/test_gelu.py")
OPTIMIZER_TESTS = ("optim/test_fused.py",)
RANKS = tuple(f"lowprec/train/{name}.py" for name in ("distributed", "state"))
RANKS_TESTS = ("distributed/test_join.py", "distributed/test_gradients.py")
RANKS_TESTS += ("distributed/test_runs.py", "distributed/test_non_finite.py")
MUTANTS = {  # name: (file, line as it is, line as it must not be)
    "random state not restored": (
        "lowprec/train/state.py", 'torch.set_rng_state(rng["cpu"])', "pass",
    ),
    "optimizer not restored": (
        "lowprec/train/state.py",
        "self.optimizer.state[parameter][key] = tensors[name].to(parameter.device)", "pass",
    ),
    "step count of the optimizer not restored": (
        "lowprec/train/state.py", 'self.optimizer.steps = state["steps"]', "pass",
    ),
    "scaler not restored": (
        "lowprec/train/state.py", 'self.scaler.load_state_dict(state["scaler"])', "pass",
    ),
    "shapes of the optimizer not checked": (
        "lowprec/train/state.py",
        "_check_same(moments[key], expected, folder / f\"{key}{SUFFIX}\")", "pass",
    ),
    "record not cut back": (
        "lowprec/train/checkpoint.py", 'self.record.cut(manifest["offsets"])', "pass",
    ),
    "data begin again at the first batch": (
        "lowprec/train/loop.py", "built.batches_from(first)", "built.batches_from(1)",
    ),
    "checkpoint written in place": (
        "lowprec/train/checkpoint.py",
        'temporary = folder / f".tmp.{final.name}"', "temporary = final",
    ),
    "rename not synced": (
        "lowprec/train/checkpoint.py",
        "os.rename(temporary, final)\n    durable.sync(final.parent)",
        "os.rename(temporary, final)",
    ),
    "files of a checkpoint not synced": (
        "lowprec/runs/durable.py",
        "_write_whole(descriptor, chunk)\n            os.fsync(descriptor)",
        "_write_whole(descriptor, chunk)",
    ),
    "record not synced before the commit": (
        "lowprec/runs/record.py",
        "durable.sync(path)\n            sizes", "sizes",
    ),
    "digests not verified": (
        "lowprec/train/checkpoint.py",
        'if not (path / name).exists() or _digest_of_file(path / name) != facts["sha256"]:',
        "if not (path / name).exists():",
    ),
    "digest of the manifest not verified": (
        "lowprec/train/checkpoint.py", "if digest != _digest_of(manifest):", "if False:",
    ),
    "no whole checkpoint means step 0": (
        "lowprec/train/checkpoint.py",
        "if faults:\n        raise CheckpointError", "if False:\n        raise CheckpointError",
    ),
    "only one checkpoint kept": (
        "lowprec/train/checkpoint.py", "list_checkpoints(run)[:-keep]",
        "list_checkpoints(run)[:-1]",
    ),
    "drift not refused": ("lowprec/runs/provenance.py", "if refused:", "if False:"),
    "two writers at once": (
        "lowprec/runs/record.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
    ),
    "torn row left behind on a full disk": (
        "lowprec/runs/durable.py", "os.ftruncate(descriptor, size)", "pass",
    ),
    "replacement depends on the worker": (
        "lowprec/data/loader.py",
        "random_words(self.seed, REPLACEMENT, position, 0, REPLACEMENTS)",
        "random_words(os.getpid(), REPLACEMENT, position, 0, REPLACEMENTS)",
    ),
    "changed shards not refused": (
        "lowprec/data/index.py",
        '_refuse_changes(promised, _digests(catalog), f"{name}={pattern}", pattern)',
        "pass",
    ),
    "snapshot as late as its spike": (
        "lowprec/train/snapshots.py", "if base.step <= step - self.settings.steps", "if True",
    ),
    "second block of a row left out of its scale": (
        "lowprec/ops/triton_quantize.py",
        "_bits(x_a, 1), _bits(x_b, 1)", "_bits(x_a, 1), _bits(x_a, 1)",
    ),
    "second block of a row left out of the sums": (
        "lowprec/ops/triton_quantize.py", "sum_b += x_b", "pass",
    ),
    "long row written over itself": (
        "lowprec/ops/triton_quantize.py",
        "q_ptr + row * K + start + cols", "q_ptr + row * K + cols",
    ),
    "largest magnitude of the last program wins": (
        "lowprec/ops/triton_quantize.py",
        "tl.atomic_max(bits_ptr + cols, tl.max(bits, axis=0), mask=cols < K)",
        "tl.store(bits_ptr + cols, tl.max(bits, axis=0), mask=cols < K)",
    ),
    "transposed copy not transposed": (
        "lowprec/ops/triton_quantize.py", "tl.trans(q), mask=mask_t", "q, mask=mask_t",
    ),
    "transposed bytes not transposed": (
        "lowprec/ops/triton_quantize.py", "at, tl.trans(q), mask=(cols", "at, q, mask=(cols",
    ),
    "quotient not corrected": (
        "lowprec/ops/triton_quantize.py",
        "q = tl.fma(tl.fma(-q, divisor, x), reciprocal, q)", "pass",
    ),
    "dequantized without its scale": (
        "lowprec/ops/triton_quantize.py", "(q * scale[:, None]).to(", "q.to(",
    ),
    "only the last terms of a product": (
        "lowprec/ops/triton_matmul.py",
        "sums = tl.dot(a, b, sums, out_dtype=ACC)", "sums = tl.dot(a, b, out_dtype=ACC)",
    ),
    "right half of a tile lost": (
        "lowprec/ops/triton_matmul.py", "right.to(out_desc.dtype)", "left.to(out_desc.dtype)",
    ),
    "int32 sums overflow": (
        "lowprec/ops/triton_matmul.py", "a_MK.shape[1] > MAX_INT8_TERMS", "False",
    ),
    "GELU not rounded before it is quantized": (
        "lowprec/ops/triton_gelu.py",
        "x_b = (x_b * _normal(x_b)[0]).to(X).to(tl.float32)", "x_b = x_b * _normal(x_b)[0]",
    ),
    "sums of the last row only": ("lowprec/ops/triton_gelu.py", "sum_a += x_a", "sum_a = x_a"),
    "gradients measured before they are unscaled": (
        "lowprec/optim/triton_adamw.py", "mask, WHOLE) * tl.load(factor_ptr)", "mask, WHOLE)",
    ),
    "what bfloat16 rounds away not kept": (
        "lowprec/optim/triton_adamw.py", "_store(c_ptr, lost.to(P_TYPE), mask, WHOLE)", "pass",
    ),
    "only the last parts of a tensor": (
        "lowprec/optim/triton_adamw.py",
        "tl.where(is_sum, total + part, tl.maximum(total, part))", "part",
    ),
    "a rank's own loss taken for that of all": (
        "lowprec/train/distributed.py",
        "dist.all_reduce(value)\n        return value / self.size", "return value",
    ),
    "host name looked up beside GPUs": (
        "lowprec/train/distributed.py",
        'if os.environ["MASTER_ADDR"] in', 'if device == "cpu" and os.environ["MASTER_ADDR"] in',
    ),
    "every rank drops the patches of the first": (
        "lowprec/clip/model.py",
        "for r in (rank, rank + 1)", "for r in (0, 1)",
    ),
    "every part drops the patches of the first": (
        "lowprec/clip/model.py",
        "self.drawn[self.next : self.next + batch]",
        "self.drawn[self.begin : self.begin + batch]",
    ),
    "rows of the first part read in every rank": (
        "lowprec/train/state.py",
        "first, count = _rows(like)", "first, count = 0, _rows(like)[1]",
    ),
}  # fmt: skip


def mutate(name: str, root: Path) -> None:
    """Applies a mutant to a copy of the sources; ValueError unless its line is there once."""
    file, before, after = MUTANTS[name]
    text = (root / file).read_text()
    if text.count(before) != 1:
        raise ValueError(f"{name}: {file} has {text.count(before)} times: {before}")
    (root / file).write_text(text.replace(before, after))


def survives(name: str | None) -> bool:
    """Whether the tests pass on a copy of the project with this mutant, or with none."""
    tests = TESTS + KERNEL_TESTS + OPTIMIZER_TESTS + RANKS_TESTS
    if name is not None:
        file = MUTANTS[name][0]
        of_room = {"ops": KERNEL_TESTS, "optim": OPTIMIZER_TESTS}
        tests = of_room.get(file.split("/")[1], RANKS_TESTS if file in RANKS else TESTS)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in ("lowprec", "experiments", "analysis", "conf", "tests", "pyproject.toml"):
            source = REPOSITORY / part
            copy = shutil.copytree if source.is_dir() else shutil.copyfile
            copy(source, root / part)
        if name is not None:
            mutate(name, root)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", *(f"tests/{file}" for file in tests)],
            cwd=root,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if name is None and done.returncode:
        print(done.stdout[-3000:])
    return done.returncode == 0


def main(names: list[str]) -> int:
    """Tries the mutants; returns 1 if one survives."""
    survivors = []
    if survives(None) is False:
        sys.exit("the tests fail without a mutant: nothing can be learned")
    for name in names or MUTANTS:
        start = time.monotonic()
        if survives(name):
            survivors.append(name)
        verdict = "SURVIVES" if name in survivors else "caught"
        print(f"{verdict:8} {time.monotonic() - start:5.0f} s  {name}", flush=True)
    print(f"{len(survivors)} of {len(names or MUTANTS)} mutants survive")
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
