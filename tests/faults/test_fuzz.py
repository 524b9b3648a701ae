"""Seeded damage to all that a command reads: no traceback, hang, bomb or silent loss.

The suite runs a few cases of each kind. 10,000 of all kinds, in about 10 minutes on two cores:
FUZZ_CASES=10000 pytest -n 2 tests/faults/test_fuzz.py; others: FUZZ_SEED=1.
"""

import contextlib
import csv
import io
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
from experiments import sweep
from lowprec.clip.text import Tokenizer
from lowprec.config.check import ConfigError, RunError
from lowprec.config.compose import compose_command
from lowprec.config.schema import DiagnosticsConfig, SpikeConfig
from lowprec.data.cache import DecodedCache
from lowprec.data.index import open_shards
from lowprec.data.loader import Batches
from lowprec.data.shards import ShardError
from lowprec.data.stream import read_url
from lowprec.data.table import write_shards as write_shards_of_table
from lowprec.runs.attempts import CheckpointError
from lowprec.train import checkpoint
from lowprec.train.preflight import preflight
from tests.analysis.conftest import make_run
from tests.data.conftest import sample, tokenize, write_shards
from tests.faults.damage import a_tar, an_override, exchange, mutate, spoil
from tests.sweep.conftest import Sweeps

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


# shards, their index, and streams

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


def test_no_exchange_of_index_and_cache_files_and_records_changes_a_batch(tmp_path, each_case):
    patterns = []
    for first in (0, 50):
        change = {n: sample(first + n) for n in range(6)}
        patterns.append(write_shards(tmp_path / str(first), [6], change))

    def batch_of(pattern, cached):
        shards = open_shards(pattern)
        cache = DecodedCache(str(tmp_path), shards.digest, 6, 8, 1) if cached else None
        batch = Batches(shards, None, 6, 1, 8, tokenize, cache=cache)[0]
        return shards.digest, batch.images.tolist(), batch.tokens.tolist(), batch.labels.tolist()

    expected = [batch_of(pattern, False) for pattern in patterns]
    indexes = {path: path.read_bytes() for path in sorted(tmp_path.glob("*/.index/*.npy"))}
    for dice in each_case("cache", 0.2):
        for _ in range(dice.choice([1, 1, 5])):
            if files := sorted(tmp_path.glob("*.decoded")):
                exchange(dice, files, 6)
        if dice.random() < 0.3:
            spoil(dice, dice.choice(list(indexes)), list(indexes), regular=True)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # an index that is made anew
                assert [batch_of(pattern, True) for pattern in patterns] == expected
        except (ShardError, ValueError) as error:
            assert ".tar" in str(error) and "index" in str(error)
            for path, data in indexes.items():
                path.write_bytes(data)


# tables of own data


def test_a_spoiled_table_is_refused_by_its_lines_or_read_whole(tmp_path, each_case, capsys):
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(sample(number)["png"])
    rows = [("filepath", "title"), *((f"{n}.png", f"ünï, {n}") for n in range(4))]
    table, out, files = tmp_path / "t.csv", tmp_path / "out", sorted(tmp_path.glob("*.png"))
    whole = {path: path.read_bytes() for path in files}
    for dice in each_case("table", 0.04):
        for path, data in whole.items():
            path.unlink(missing_ok=True) if not path.is_dir() else path.rmdir()
            path.write_bytes(data)
        with table.open("w", newline="") as file:
            csv.writer(file, delimiter=dice.choice(",;\t")).writerows(rows)
        spoil(dice, dice.choice([table, table, *files]), [table, *files], regular=True)
        if dice.random() < 0.2:
            spoil(dice, dice.choice(files), files)
        shutil.rmtree(out, ignore_errors=True)
        try:
            skipped = write_shards_of_table(table, out, list(rows[0]), skip_bad=dice.random() < 0.5)
        except (ValueError, RunError) as error:
            assert str(error) and not out.exists()
        else:
            with tarfile.open(out / "00000.tar") as tar:
                assert len(tar.getnames()) / 2 + skipped == len(csv_rows(table))


def csv_rows(table: Path) -> list:
    text = table.read_text("utf-8-sig")
    separator = max("\t,;", key=text.split("\n")[0].count)
    return list(csv.DictReader(io.StringIO(text, newline=""), delimiter=separator))


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


# sweeps

NOTHING = ("no sweeps in runs/sweeps yet", "nothing in this sweep was submitted")


def test_verbs_survive_the_spoiled_files_of_a_sweep_or_name_them(
    tmp_path, monkeypatch, capsys, each_case
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.local, "start", lambda *_: None)
    plan = Sweeps(tmp_path).make(3)
    plan.hand_over([0, 1, 2], {"name": "local", "parallel": 1, "gpus": 0})
    for index in range(3):
        plan.end(index, "no")
        directory = plan.directory_of(index)
        directory.mkdir(parents=True)
        (directory / "status.json").write_text('{"state": "running", "step": 1, "saved": 0}')
        (directory / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    runs, whole = tmp_path / "runs", tmp_path / "whole"
    shutil.copytree(runs, whole)
    for dice in each_case("sweep", 0.1):
        shutil.rmtree(runs)
        shutil.copytree(whole, runs)
        files = sorted(path for path in runs.rglob("*.*") if path.is_file())
        for path in dice.sample(files, dice.choice([1, 1, 2, 4])):
            spoil(dice, path, files)
        for words in (["status"], ["resubmit", "--failed"], ["cancel"]):
            capsys.readouterr()
            try:
                sweep.command(words)
            except SystemExit as left:
                fault = capsys.readouterr().err if left.code == 2 else left.code
                assert str(plan.folder) in fault or any(map(fault.count, NOTHING)), fault
