"""Disables one function at a time: the tests named beside it must fail.

    python tests/mutants.py [FUNCTION ...]      (make mutants)

A disabled function does nothing and returns None, or what the table says, in the test process and
in every process that it starts. A mutant that survives exits 1: its tests cannot fail.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
MUTANTS = {  # function: (value of a call in its arguments `a`, tests that must fail)
    "lowprec.train.state:TrainState.load": ("None", "train/test_loop.py"),
    "lowprec.train.state:_set_random_state": ("None", "train/test_loop.py"),
    "lowprec.train.state:_check_same": ("None", "train/test_saver.py train/test_checkpoint.py"),
    "lowprec.train.checkpoint:file_digest": ("''", "train/test_checkpoint.py"),
    "lowprec.train.checkpoint:retire": ("None", "train/test_checkpoint.py train/test_saver.py"),
    "lowprec.train.checkpoint:remove_leftovers": ("None", "train/test_saver.py"),
    "lowprec.train.snapshots:SnapshotRecorder.after_flush": ("None", "train/test_snapshots.py"),
    "lowprec.runs.durable:sync": ("None", "train/test_crash.py"),
    "lowprec.runs.record:Record.cut": ("None", "train/test_saver.py"),
    "lowprec.runs.record:_drop_torn_end": ("None", "runs/test_record.py"),
    "lowprec.runs.provenance:refuse_mismatch": ("[]", "train/test_saver.py"),
    "lowprec.runs.provenance:code_digest": ("'same'", "runs/test_provenance.py"),
    "lowprec.data.index:_refuse_changes": ("None", "data/test_index.py"),
    "lowprec.data.workers:end_workers": ("None", "data/test_loader.py"),
    "lowprec.diagnostics.spikes:_count_once": ("(a[0], a[2])", "diagnostics/test_spikes.py"),
    "lowprec.diagnostics.spikes:_is_raised": ("False", "diagnostics/test_spikes.py"),
    "lowprec.diagnostics.spikes:spike_events": ("[]", "diagnostics/test_monitor.py"),
    "lowprec.nn.blocks:_is_cache": ("False", "nn/test_prepare.py"),
    "lowprec.optim.statistics:ShardReduction.reduce": ("a[1]", "distributed/test_sharding.py"),
    "lowprec.ops.triton_attention:attention_backward": ("a[1]", "ops/test_attention.py"),
    "lowprec.nn.attention:Attention._attend": ("a[1][..., :32]", "nn/test_attention.py"),
    "lowprec.optim.adamw_update:clipped_lr": ("a[0]", "optim/test_stable_adamw.py"),
    "lowprec.optim.eight_bit:quantize_": ("None", "optim/test_eight_bit.py"),
    "lowprec.optim.fused:first_unfit": ("None", "optim/test_fused.py"),
    "lowprec.optim.stable_adamw:StableAdamW._read_by_a_graph": ("[]", "optim/test_fused.py"),
    "lowprec.train.build:Built.use_precision": ("None", "train/test_precision_change.py"),
    "lowprec.train.distributed:DistributedRanks.mean": ("a[1]", "distributed/test_gradients.py"),
    "analysis.comparison:one_variant": ("a[0]", "analysis/test_comparison.py"),
}
PATCH = """
import importlib
module = importlib.import_module({module!r})
owner, _, name = {path!r}.rpartition(".")
setattr(getattr(module, owner) if owner else module, name, lambda *a, **k: {value})
"""


def survives(function: str) -> bool:
    """Whether the tests of a function pass without it."""
    value, tests = MUTANTS[function]
    module, path = function.split(":")
    with tempfile.TemporaryDirectory() as folder:
        patch = PATCH.format(module=module, path=path, value=value)
        Path(folder, "sitecustomize.py").write_text(patch)
        paths = os.pathsep.join([folder, str(REPOSITORY)])
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *(f"tests/{name}" for name in tests.split())],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": paths, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
        )
    if done.returncode not in (0, 1):
        sys.exit(f"{function}: the tests did not run\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0


def main(functions: list[str]) -> int:
    """Prints each function with its fate; returns 1 if a mutant survived."""
    survivors = []
    for function in functions or MUTANTS:
        alive = survives(function)
        survivors += [function] * alive
        print(f"{'SURVIVES' if alive else 'noticed '}  {function}", flush=True)
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
