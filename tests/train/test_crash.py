"""A run that is killed anywhere goes on as if nothing had happened.

Every call that changes the run directory is a crash point. The run starts again from what a kill
at each point leaves, and from what a power cut leaves, which takes away all that was not synced. It
must resume at or after the last committed checkpoint and end with the record and the weights of the
undisturbed run, to the byte.
"""

import hashlib
import io
import json
import random
import shutil
import signal
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from lowprec.runs.read import find_runs, read_rows, read_status
from lowprec.train.checkpoint import newest_checkpoint
from tests.distributed.conftest import Server
from tests.same import contents, differing

SETTINGS = {
    "num_steps": 3,
    "batch_size": 4,
    "save_every": 1,
    "model.patch_dropout": 0.5,
    "precision.autocast": "fp16",  # overflows at first, so that the scaler has a state to lose
    "scaler.name": "dynamic",
    "data.max_skip_rate": 1.0,
}


def attempt(server, config, snapshots=None, signals=()):
    """One attempt of a run; its exit code, seconds, and what it noted, also by kind."""
    folder = Path(config["run_dir"] + ".attempt")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    signals = [{"rank": 0, **each} for each in signals]
    options = {"config": config, "snapshots": snapshots and str(snapshots)}
    answer = server("attempt", 1, folder, signals=signals, **options)
    notes = folder / "notes.jsonl"
    rows = read_rows(notes) if notes.exists() else []
    kinds = ("committed", "restored", "points")
    noted = {kind: [row[kind] for row in rows if kind in row] for kind in kinds}
    [code], [seconds], [log] = answer["codes"], answer["seconds"], answer["logs"]
    return {"code": code, "seconds": seconds, "log": log, "notes": rows, **noted}


@pytest.fixture(scope="module")
def servers(request):
    """One for the fast tests; another takes as long to start as half of their attempts."""
    here = [item for item in request.session.items if item.path == request.path]
    is_slow = any(item.get_closest_marker("slow") for item in here)
    servers = [Server() for _ in range(1 + is_slow)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="module")
def shard(squares, tmp_path_factory):
    """A shard of squares, five of them damaged, so that skips are recorded too."""
    folder = tmp_path_factory.mktemp("crash")
    with tarfile.open(squares / "train-0.tar") as source:
        with tarfile.open(folder / "train-0.tar", "w") as target:
            for member in source:
                data = source.extractfile(member).read()
                if member.name.endswith("7.png"):
                    data = data[:60]
                    member.size = len(data)
                target.addfile(member, io.BytesIO(data))
    return folder / "train-0.tar"


@pytest.fixture
def make(make_config, shard, tmp_path):
    """`make(name)`: a config whose run lives alone in a folder of that name."""

    def make(name, changes=None):
        changes = {**SETTINGS, "data.train": str(shard), **(changes or {})}
        config = asdict(make_config({**changes, "run_dir": str(tmp_path / name)}))
        config["data"]["val"] = None
        return config

    return make


@pytest.fixture(scope="module")
def module_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("crashes")


@pytest.fixture
def undisturbed(make, servers, module_folder):
    """A run that nothing happened to, and what a crash at each point would have left of it."""
    snapshots = module_folder / "snapshots"
    config = make("undisturbed") | {"run_dir": str(module_folder / "undisturbed")}
    if not snapshots.exists():
        snapshots.mkdir()
        for server in servers:
            server("train", 0, module_folder, configs=[make(f"warm-{id(server)}")])
        answer = attempt(servers[0], config, snapshots)
        assert answer["code"] == 0 and "warning" not in answer["log"], answer["log"]
        (module_folder / "answer.json").write_text(json.dumps(answer))
        points = enumerate(answer["points"][0])
        saving = [n for n, p in points if p[:5] == "write" and "/.tmp.step_000000003/" in p]
        shutil.copytree(snapshots / f"{saving[2]:04d}.half", module_folder / "torn")
    return find_runs(config["run_dir"])[0], json.loads((module_folder / "answer.json").read_text())


def check_resume(server, config, expected, where, safe=0):
    """Resumes a run, from step `safe` or a later one, and compares all there is to compare."""
    root = Path(config["run_dir"])
    for run in find_runs(root):
        newest = newest_checkpoint(run)
        for name, size in (newest[1]["offsets"] if newest else {}).items():
            assert (run / name).stat().st_size >= size, (where, name)
    is_done = any(read_status(run)["state"] == "finished" for run in find_runs(root))
    answer = attempt(server, config)
    assert answer["code"] == 0, (where, answer)
    assert is_done or answer["restored"][0] >= safe, (where, "resumed below the last commit")
    check_whole(root, expected, where)
    shutil.rmtree(root)


def check_whole(root, expected, where):
    [run] = find_runs(root)
    assert not differing(contents(run), expected), where
    assert read_status(run)["state"] == "finished", where
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == ["step_000000002", "step_000000003"], where
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3], where


def on_all(servers, work, trials):
    """Calls `work(server, trial)` for all trials, shared out over the servers."""
    waiting = iter(trials)

    def serve(server):
        for trial in iter(lambda: next(waiting, None), None):
            work(server, trial)

    with ThreadPoolExecutor(len(servers)) as pool:
        for done in [pool.submit(serve, server) for server in servers]:
            done.result()


def check_crashes(servers, config, expected, answer, snapshots, kinds, step, last=10**9):
    """Resumes from what a crash of these kinds would leave at each `step`-th point up to `last`."""
    note = "durable" if kinds == ["cut"] else "committed"

    def work(server, crash):
        point = int(crash.name.split(".")[0])
        earlier = [row[note] for row in answer["notes"] if note in row and row["point"] <= point]
        where = f"{crash.name}: {answer['points'][0][point]}"
        trial = config | {"run_dir": str(crash)}
        check_resume(server, trial, expected, where, max(earlier, default=0))

    crashes = sorted(path for kind in kinds for path in Path(snapshots).glob(f"*.{kind}"))
    crashes = [path for path in crashes if int(path.name.split(".")[0]) <= last]
    distinct = {digest(path): path for path in crashes}  # of equal ones the last: it must keep most
    on_all(servers, work, list(distinct.values())[::step])


def digest(folder):
    """A digest of the names and bytes below a folder."""
    parts = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        data = path.read_bytes() if path.is_file() else b""
        parts.update(f"{path.relative_to(folder)} {path.is_file()} {len(data)} ".encode() + data)
    return parts.digest()


# The fast tests take a fifth of the crash points; the slow ones take all.
crash_points = pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])


@crash_points
def test_a_kill_at_a_crash_point_changes_nothing(servers, make, undisturbed, module_folder, step):
    run, answer = undisturbed
    kinds = {point.split()[0] for point in answer["points"][0]}
    assert {"write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir"} <= kinds
    snapshots = module_folder / "snapshots"
    check_crashes(servers, make("a"), contents(run), answer, snapshots, ["before", "half"], step)


@crash_points
def test_a_power_cut_at_a_sync_or_rename_changes_nothing(
    servers, make, undisturbed, module_folder, step
):
    run, answer = undisturbed
    snapshots = module_folder / "snapshots"
    check_crashes(servers, make("a"), contents(run), answer, snapshots, ["cut"], step)


@crash_points
def test_a_kill_at_a_crash_point_of_a_resume_changes_nothing(
    servers, make, undisturbed, module_folder, tmp_path, step
):
    run, _ = undisturbed
    torn, snapshots = make("torn"), tmp_path / "snapshots"
    snapshots.mkdir()
    shutil.copytree(module_folder / "torn", torn["run_dir"])
    answer = attempt(servers[0], torn, snapshots)
    assert answer["restored"] == [2]
    resumed = answer["points"][0]
    assert {"truncate", "unlink"} <= {point.split()[0] for point in resumed}
    rows = [n for n, point in enumerate(resumed) if point[:5] == "write" and "metrics" in point]
    kinds, last = ["before", "half"], rows[0] + 3
    check_crashes(servers, torn, contents(run), answer, snapshots, kinds, step, last)


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.slow)])
def test_random_kills_change_nothing(servers, make, undisturbed, count):
    generator = random.Random(count)
    seconds = attempt(servers[0], make("timed"))["seconds"]
    expected = contents(undisturbed[0])

    def work(server, trial):
        config = make(f"trial-{trial}")
        kill = {"number": signal.SIGKILL, "after_s": seconds * trial}
        answer = attempt(server, config, signals=[kill])
        check_resume(server, config, expected, trial, max(answer["committed"], default=0))

    on_all(servers, work, [generator.random() for _ in range(count)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2], ids=["TERM", "USR2"])
@pytest.mark.parametrize("count", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_stops_at_random_times_lose_no_step(servers, make, undisturbed, number, count):
    """Stops at random times, `count` of them in a running loop, lose no step and repeat none."""
    server, expected, generator = servers[0], contents(undisturbed[0]), random.Random(count)
    seconds, stopped = attempt(server, make("timed"))["seconds"], 0
    for trial in range(10 * count):
        if stopped == count:
            return
        config = make(f"stop-{trial}")
        signals = [{"number": number, "after_s": generator.uniform(0, seconds)}]
        signals += [{"number": number, "after_s": 0.01}] * (trial % 3)  # more change nothing
        answer = attempt(server, config, signals=signals)
        assert answer["code"] in (75, 0, -number), (signals, answer)  # -number: not begun yet
        if answer["code"] == 75:
            [run] = find_runs(config["run_dir"])
            step = read_status(run)["step"]
            rows = read_rows(run / "metrics.jsonl")
            assert [row["step"] for row in rows] == list(range(1, step + 1))
            stopped += 1
        second = attempt(server, config)
        assert second["code"] == 0
        if answer["code"] == 75:
            assert second["restored"] == [step], (signals, answer, second)
            assert not list(run.glob("cut/*/metrics.jsonl"))
        check_whole(config["run_dir"], expected, signals)
    raise AssertionError(f"only {stopped} of {10 * count} signals came while the run was going")
