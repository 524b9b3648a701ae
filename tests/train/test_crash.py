"""A run that is killed anywhere goes on as if nothing had happened.

Every call that changes the run directory is a crash point; at each the process is killed, in a
second pass with all that was not synced taken away (a power cut), and the run is started again. It
must resume at or after the last committed checkpoint and end with the record and the weights of the
undisturbed run, to the byte.
"""

import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lowprec.runs.identity import to_dict
from lowprec.runs.read import find_runs, read_rows, read_status
from lowprec.train.checkpoint import list_checkpoints, newest_checkpoint

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
LAST = ("model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors", "state.json")
SETTINGS = {
    "num_steps": 5,
    "batch_size": 8,
    "save_every": 2,
    "log_every": 2,
    "model.vision_layers": 1,
    "model.patch_dropout": 0.5,
    "precision.autocast": "fp16",  # overflows at first, so that the scaler has a state to lose
    "scaler.name": "dynamic",
    "data.max_skip_rate": 1.0,
}


class Server:
    """The process that forks attempts."""

    def __init__(self):
        self.warm = False
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(Path(__file__).with_name("crash_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": PYTHONPATH,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",  # a GPU cannot be used after a fork
            },
        )

    def attempt(self, config, **order):
        self.process.stdin.write(json.dumps({"config": config, **order}) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        noted = {key: [row[key] for row in answer["log"] if key in row] for key in
                 ("committed", "durable", "restored", "points", "error")}  # fmt: skip
        return answer | noted


@pytest.fixture(scope="module")
def servers():
    servers = [Server() for _ in range(2)]
    yield servers
    for server in servers:
        server.process.communicate(timeout=20)


@pytest.fixture(scope="module")
def shard(squares, tmp_path_factory):
    """A shard of squares, one of them damaged, so that skips are recorded too."""
    folder = tmp_path_factory.mktemp("crash")
    with tarfile.open(squares / "train-0.tar") as source:
        with tarfile.open(folder / "train-0.tar", "w") as target:
            for member in source:
                data = source.extractfile(member).read()
                if member.name == "s00007.png":
                    data = data[:60]
                    member.size = len(data)
                target.addfile(member, io.BytesIO(data))
    return folder / "train-0.tar"


@pytest.fixture
def make(make_config, shard, tmp_path):
    """`make(name)`: a config whose run lives alone in a folder of that name."""

    def make(name, changes=None):
        changes = {**SETTINGS, "data.train": str(shard), **(changes or {})}
        config = to_dict(make_config({**changes, "run_dir": str(tmp_path / name)}))
        config["data"]["val"] = None
        return config

    return make


@pytest.fixture
def undisturbed(make, servers):
    """Folder and crash points of a run that nothing happened to."""
    for server in servers:
        if not server.warm:
            server.attempt(make(f"warm-{id(server)}"), warm_up=True)
            server.warm = True
    config = make("undisturbed")
    answer = servers[0].attempt(config)
    assert answer["status"] == 0, Path(config["run_dir"] + ".log.err").read_text()
    return find_runs(config["run_dir"])[0], answer["points"][0]


def contents(run):
    """What must be the same: metrics, skips, tensors, the last checkpoint's weights and moments."""
    last = list_checkpoints(run)[-1]
    files = [run / "metrics.jsonl", run / "skips.jsonl", run / "tensors.parquet"]
    files += [last / name for name in LAST]
    return {path.name: path.read_bytes() for path in files}


def check_trial(server, config, expected, crash, *, power_cut=False, start_from=None):
    """Crashes an attempt, resumes it, and compares all there is to compare."""
    root, where = Path(config["run_dir"]), json.dumps([crash, power_cut])
    if start_from is not None:
        shutil.copytree(start_from, root)
    first = server.attempt(config, crash=crash, power_cut=power_cut)
    assert first["status"] == -9 or ("after_s" in crash and first["status"] == 0), (where, first)
    for run in find_runs(root):
        found = newest_checkpoint(run)
        for name, size in (found[1]["offsets"] if found else {}).items():
            assert (run / name).stat().st_size >= size, (where, name)
    written = [run for run in find_runs(root) if (run / "status.json").exists()]
    done = any(read_status(run)["state"] == "finished" for run in written)
    second = server.attempt(config)
    assert second["status"] == 0, (where, second)
    if first["status"] == -9 and not done:  # else it was killed on its way out
        safe = max(first["durable" if power_cut else "committed"], default=0)
        assert second["restored"][0] >= safe, (where, "resumed below the last commit", second)
    check_whole(root, expected, where)
    shutil.rmtree(root)


def check_whole(root, expected, where):
    [run] = find_runs(root)
    found = contents(run)
    assert [name for name in expected if found[name] != expected[name]] == [], where
    assert read_status(run)["state"] == "finished", where
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(names) == 2 and names[-1] == "step_000000005" and names[0][:5] == "step_", where
    assert [row["step"] for row in read_rows(run / "metrics.jsonl")] == [1, 2, 3, 4, 5], where


def check_all(servers, make, expected, trials, **options):
    """Trials, shared out over the servers."""

    def work(server):
        config = make(f"trial-{id(server)}")
        for crash in iter(lambda: next(waiting, None), None):
            check_trial(server, config, expected, crash, **options)

    waiting = iter(trials)
    with ThreadPoolExecutor(len(servers)) as pool:
        for done in [pool.submit(work, server) for server in servers]:
            done.result()


def crashes(points, kinds=()):
    """Before each point, and in the middle of each write.

    Without kinds a sync is left out: a kill before it leaves what a kill at the next point leaves.
    """
    for number, point in enumerate(points):
        if point.startswith(kinds) if kinds else not point.startswith("fsync"):
            yield {"point": number, "part": "before"}
        if not kinds and point.startswith("write"):
            yield {"point": number, "part": "half"}


def test_a_kill_at_every_crash_point_changes_nothing(servers, make, undisturbed):
    run, points = undisturbed
    kinds = {point.split()[0] for point in points}
    assert {"write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir"} <= kinds
    assert len(points) > 100
    check_all(servers, make, contents(run), crashes(points))


def test_a_power_cut_at_every_sync_and_rename_changes_nothing(servers, make, undisturbed):
    run, points = undisturbed
    trials = crashes(points, ("fsync", "rename", "replace", "truncate"))
    check_all(servers, make, contents(run), trials, power_cut=True)


def test_a_kill_at_every_crash_point_of_a_resume_changes_nothing(servers, make, undisturbed):
    run, points = undisturbed
    half_saved = next(n for n, point in enumerate(points) if ".tmp.step_000000005" in point) + 3
    config = make("torn")
    servers[0].attempt(config, crash={"point": half_saved, "part": "before"})
    torn = Path(config["run_dir"])
    whole = make("whole")
    shutil.copytree(torn, whole["run_dir"])
    answer = servers[0].attempt(whole)
    assert answer["restored"] == [4]
    resumed = answer["points"][0]
    assert {"truncate", "unlink"} <= {point.split()[0] for point in resumed}
    first_step = next(n for n, point in enumerate(resumed) if "metrics.jsonl" in point and n > 20)
    check_all(servers, make, contents(run), crashes(resumed[: first_step + 3]), start_from=torn)


def random_kills(servers, make, undisturbed, count, seed):
    generator = random.Random(seed)
    seconds = servers[0].attempt(make("timed"))["seconds"]
    trials = [{"after_s": generator.uniform(0, seconds)} for _ in range(count)]
    check_all(servers, make, contents(undisturbed[0]), trials)


def test_40_random_kills_change_nothing(servers, make, undisturbed):
    random_kills(servers, make, undisturbed, 40, seed=0)


@pytest.mark.slow
def test_200_random_kills_change_nothing(servers, make, undisturbed):
    random_kills(servers, make, undisturbed, 200, seed=1)


def random_stops(servers, make, undisturbed, number, count):
    """Stops at random times, `count` of them in a running loop, lose no step and repeat none."""
    server, expected, generator = servers[0], contents(undisturbed[0]), random.Random(count)
    seconds, stopped = server.attempt(make("timed"))["seconds"], 0
    for trial in range(10 * count):
        if stopped == count:
            return
        config = make(f"stop-{trial}")
        signals = [{"signal": number, "after_s": generator.uniform(0, seconds)}]
        signals += [{"signal": number, "after_s": 0.01}] * (trial % 3)  # more change nothing
        answer = server.attempt(config, signals=signals)
        assert answer["status"] in (75, 0, -number), (signals, answer)  # -number: not begun yet
        if answer["status"] == 75:
            [run] = find_runs(config["run_dir"])
            step = read_status(run)["step"]
            rows = read_rows(run / "metrics.jsonl")
            assert [row["step"] for row in rows] == list(range(1, step + 1))
            stopped += 1
        second = server.attempt(config)
        assert second["status"] == 0
        if answer["status"] == 75:
            assert second["restored"] == [step], (signals, answer, second)
            assert not list(run.glob("cut/*/metrics.jsonl"))
        [run] = find_runs(config["run_dir"])
        found = contents(run)
        assert [name for name in expected if found[name] != expected[name]] == [], signals
    raise AssertionError(f"only {stopped} of {10 * count} signals came while the run was going")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2], ids=["TERM", "USR2"])
def test_6_stops_at_random_times_lose_no_step(servers, make, undisturbed, number):
    random_stops(servers, make, undisturbed, number, 6)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2], ids=["TERM", "USR2"])
def test_50_stops_at_random_times_lose_no_step(servers, make, undisturbed, number):
    random_stops(servers, make, undisturbed, number, 50)


def test_signals_and_a_kill_during_the_save_change_nothing(servers, make, undisturbed):
    expected = contents(undisturbed[0])
    for delay in (0.05, 0.1, 0.15, 0.2):
        config = make(f"mixed-{delay}")
        kinds = (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL)
        times = (delay, 0.01, 0.01)
        signals = [{"signal": n, "after_s": t} for n, t in zip(kinds, times, strict=True)]
        servers[0].attempt(config, signals=signals)
        assert servers[0].attempt(config)["status"] == 0
        check_whole(config["run_dir"], expected, delay)
