"""Seeded damage to what others made or typed: no traceback, hang, bomb or silent loss.

The suite runs a few cases of each kind. Many more:
FUZZ_CASES=10000 pytest -n 2 tests/faults/test_fuzz.py; others: FUZZ_SEED=1.
"""

import os
import random
import shutil
import signal
import tarfile
import warnings
import zipfile
from pathlib import Path

import pytest

from analysis import load_runs
from analysis.figures import FIGURES
from analysis.report import page as report_page
from lowprec.clip.text import Tokenizer
from lowprec.config.check import ConfigError
from lowprec.config.compose import compose_command
from lowprec.config.schema import DiagnosticsConfig, SpikeConfig
from lowprec.data.index import open_shards
from lowprec.data.loader import Batches
from lowprec.data.stream import read_url
from lowprec.runs.attempts import CheckpointError
from lowprec.train import checkpoint
from lowprec.train.preflight import preflight
from tests.analysis.conftest import make_run
from tests.faults.damage import a_tar, an_override, mutate, spoil

CASES, SEED = int(os.environ.get("FUZZ_CASES", 60)), int(os.environ.get("FUZZ_SEED", 0))
DEADLINE_S = 20  # of one case
MOST = 2**30  # bytes of memory that reading may take
STEPS = 24
WATCHED = DiagnosticsConfig(spikes=SpikeConfig(ignore_steps=5, window=10))
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(2 * CASES)]


class Hang(BaseException):
    """A case took longer than its deadline."""


def memory(name: str) -> int:
    """Bytes of memory of this process: VmRSS now, VmHWM at most since `clear_refs`."""
    (line,) = [x for x in Path("/proc/self/status").read_text().split("\n") if x.startswith(name)]
    return 1024 * int(line.split()[1])


@pytest.fixture
def each_case():
    """`each_case(name, share)`: a generator of dice; a failed case is named by its seed."""

    def end(*_):
        raise Hang

    def cases(name, share):
        count = max(3, int(CASES * share))
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of earlier tests
        start = memory("VmRSS")
        for number in range(SEED * count, (SEED + 1) * count):
            cases.now = f"{name} {number}"
            signal.alarm(DEADLINE_S)
            yield random.Random(cases.now)
        signal.alarm(0)
        taken = memory("VmHWM") - start
        assert taken < MOST, f"{name}: {taken / 2**20:.0f} MiB"

    before = signal.signal(signal.SIGALRM, end)
    yield cases
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
    print(cases.now)  # the last case: that which failed


# run directories, in folders and archives


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("two")
    for lr in (1e-3, 2e-3):
        make_run(root, num_steps=STEPS, steps=STEPS, lr=lr, diagnostics=WATCHED, flush=8)
    return root


def archive(dice: random.Random, run: Path) -> None:
    """Moves a run into an archive beside it, which is damaged in one of three cases."""
    path = run.parent / "runs.zip"
    with zipfile.ZipFile(path, "w", dice.choice([0, 8, 12])) as file:
        for inner in sorted(run.rglob("*")):
            if inner.is_file():
                file.write(inner, inner.relative_to(run.parent))
    shutil.rmtree(run)
    if dice.random() < 0.33:
        path.write_bytes(mutate(dice, path.read_bytes()))


def test_a_spoiled_run_is_noted(two_runs, tmp_path, monkeypatch, each_case):
    monkeypatch.setattr(report_page, "get_plotlyjs", lambda: "")
    for dice in each_case("run", 0.25):
        root = tmp_path / "runs"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(two_runs, root)
        bad, good = sorted(path.parent for path in root.glob("**/status.json"))
        files = sorted(path for path in bad.rglob("*") if path.is_file() and path.name != ".lock")
        is_archived = dice.random() < 0.2
        for path in dice.sample(files, dice.choice([1, 1, 2, 4])):
            twin = good / path.relative_to(bad)  # but a figure has one run of each config
            others = files if path.name == "config.yaml" else [*files, twin]
            spoil(dice, path, others, regular=is_archived)
        if is_archived:
            archive(dice, bad)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            runs = load_runs(root)
            rows = runs.runs.set_index("run")
            metrics = runs.metrics.groupby("run").size()
            tensors = runs.tensors("*").groupby("run").size()
        left_out = any("left out" in str(warning.message) for warning in caught)
        assert rows["note"][good.name] == "" and metrics[good.name] == tensors[good.name] == STEPS
        if bad.name not in rows.index:
            lacking = {"config.yaml", "status.json"} - {path.name for path in bad.glob("*")}
            assert lacking or left_out
        elif rows["note"][bad.name] == "":
            assert metrics[bad.name] == STEPS and (left_out or tensors[bad.name] == STEPS)
        if dice.random() < 0.05:
            frame = FIGURES["rms_and_loss"].query(runs)
            assert (frame["run"] == good.name).sum() == STEPS
            assert good.name in set(FIGURES["loss_curves"].query(runs)["run"])
            assert good.name in report_page.make_page(runs)


# checkpoints


def test_a_spoiled_checkpoint_is_refused_or_whole(tmp_path, each_case, capsys):
    run = tmp_path / "run"
    for step in (4, 8):
        temporary, final = run / "tmp", run / "checkpoints" / f"step_{step:09d}"
        temporary.mkdir(parents=True)
        final.parent.mkdir(exist_ok=True)
        files = checkpoint._write_files(temporary, {"a.bin": b"abc" * step})
        body = {"format": checkpoint.FORMAT, "step": step, "offsets": {}, "files": files}
        checkpoint._commit(temporary, final, body)
    shutil.copytree(run, tmp_path / "whole")
    for dice in each_case("checkpoint", 0.06):
        shutil.rmtree(run)
        shutil.copytree(tmp_path / "whole", run)
        files = sorted(path for path in run.rglob("*") if path.is_file())
        for path in dice.sample(files, dice.choice([1, 1, 2, 4])):
            spoil(dice, path, files)
        try:
            path, body = checkpoint.newest_checkpoint(run)
        except CheckpointError as error:
            assert str(run) in str(error)
            continue
        step = body["step"]
        assert path.name == f"step_{step:09d}" and (path / "a.bin").read_bytes() == b"abc" * step


# shards and streams

TOKENIZER = Tokenizer(77)


def test_each_mutated_shard_is_read_skipped_or_refused(tmp_path, each_case):
    path = tmp_path / "a.tar"
    for dice in each_case("shard", 0.2):
        path.write_bytes(a_tar(dice))
        members, fault = [], None
        try:
            members += read_url(str(path))
        except (ValueError, OSError, tarfile.TarError) as error:
            fault = error
        try:
            shards = open_shards(str(path), accept=True)
        except ValueError as error:
            assert str(path) in str(error) and (fault or "no whole sample" in str(error))
            continue
        assert fault is None and members
        count = shards.num_samples
        batch = Batches(shards, None, count, 1, image_size=16, tokenizer=TOKENIZER)[0]
        assert len(batch.images) + len(batch.skips) == count
        assert all(skip["key"] and skip["reason"] for skip in batch.skips)


# command lines


def test_random_commands_compose_or_are_refused(tmp_path, monkeypatch, each_case):
    monkeypatch.chdir(tmp_path)
    for dice in each_case("command", 0.15):
        words = [an_override(dice) for _ in range(dice.choice([1, 1, 2, 3, 5]))]
        try:
            compose_command(words, multirun=dice.random() < 0.5, preflight=preflight)
        except ConfigError as error:
            assert error.faults
    assert not list(tmp_path.iterdir())
