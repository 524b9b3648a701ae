"""Fixtures of all rooms: a small set of colored squares, tiny configs, one attempt of a run."""

import os
from dataclasses import asdict

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: kernels run on the CPU

import fcntl  # noqa: E402
import importlib.util  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import tarfile  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy as np  # noqa: E402
import pytest  # noqa: E402
from PIL import Image  # noqa: E402

from lowprec.config.check import check  # noqa: E402
from lowprec.runs.record import Record  # noqa: E402
from tests.small import MODEL  # noqa: E402

torch.set_num_threads(1)
COLORS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "gray": (120,) * 3}


def write_shard(path: Path, count: int, seed: int = 0) -> None:
    """A shard of noisy single-color squares captioned by their color."""
    generator = np.random.default_rng(seed)
    with tarfile.open(path, "w") as tar:
        for i in range(count):
            label = i % len(COLORS)
            pixels = np.array(list(COLORS.values())[label]) + generator.normal(0, 20, (32, 32, 3))
            buffer = io.BytesIO()
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
            caption = f"a {list(COLORS)[label]} square"
            for kind, data in (("png", buffer.getvalue()), ("txt", caption.encode()),
                               ("cls", str(label).encode())):  # fmt: skip
                member = tarfile.TarInfo(f"s{i:05d}.{kind}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws what it draws alone, in whatever order and process it runs."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def unbroken_pipes():
    """A test that leaves SIGPIPE its default action fails: a later one would kill this process."""
    yield
    assert signal.signal(signal.SIGPIPE, signal.SIG_IGN) == signal.SIG_IGN


@pytest.fixture(scope="session", autouse=True)
def unsynced():
    """Only a power cut could tell what was synced (train/test_crash.py), and it takes long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session")
def device() -> torch.device:
    """A GPU where there is one; else the kernels are interpreted."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def right_interpreter(monkeypatch):
    """The interpreter with torch's casts, where kernels are interpreted."""
    if not torch.cuda.is_available():
        where = Path(__file__).parent / "ops" / "interpreter.py"
        spec = importlib.util.spec_from_file_location("interpreter_patch", where)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.patch(monkeypatch)


@pytest.fixture(scope="session")
def squares(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("squares")
    for i in range(2):
        write_shard(folder / f"train-{i}.tar", 48, seed=i)
    write_shard(folder / "val-0.tar", 24, seed=9)
    (folder / "classnames.txt").write_text("\n".join(COLORS))
    (folder / "templates.txt").write_text("a {} square\nthe {} square\n")
    return folder


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """`once(name, fill)`: a folder that `fill(folder)` fills once for all workers of xdist."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name, fill):
        folder, done = base / name, base / f"{name}.done"
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
                folder.mkdir()
                fill(folder)
                done.touch()
        return folder

    return folder_of


@pytest.fixture
def make_config(tiny_config, tmp_path):
    """`make_config({"optimizer.lr": 1e-3, ...})`: a checked tiny config with some keys changed."""
    return lambda changes=None: tiny_config(tmp_path / "runs", changes or {})


@pytest.fixture(scope="session")
def tiny_config(squares):
    """`tiny_config(run_dir, changes)`: see `make_config`."""

    def make(run_dir: Path, changes: dict):
        raw = {
            "num_steps": 12,
            "batch_size": 16,
            "num_workers": 0,
            "device": "cpu",
            "log_every": 3,
            "save_every": 4,
            "keep_checkpoints": 2,
            "run_dir": str(run_dir),
            "model": {**MODEL, "embed_dim": 32, "context_length": 8},
            "precision": {"autocast": "fp32"},
            "optimizer": {"lr": 1e-3},
            "data": {"name": "shards", "train": str(squares / "train-*.tar"),
                     "val": str(squares / "val-*.tar")},
            "evaluation": {"name": "none"},
        }  # fmt: skip
        raw = json.loads(json.dumps(raw))
        for path, value in changes.items():
            node = raw
            *groups, leaf = path.split(".")
            for group in groups:
                node = node.setdefault(group, {})
            node[leaf] = value
        return check(raw)

    return make


@pytest.fixture
def built(make_config):
    """`built(changes)`: what the run of such a config is built of."""
    from lowprec.data.open import open_data
    from lowprec.train.build import build

    def make(changes=None):
        config = make_config(changes)
        return build(config, open_data(config))

    return make


@pytest.fixture(scope="session")
def run_once():
    """`run_once(config, folder, **options)`: one attempt; returns how it ended and the objects.

    `spoil(built)` changes the objects before training; `at`: functions of them by the step whose
    batch comes next; a signal comes with the batch of step `stop_at`, a kill with that of `kill_at`
    (how it ended is then None); `options` are `train`'s.
    """
    # with open_clip, which takes seconds: other tests need not wait
    from lowprec.data.open import open_data
    from lowprec.train.build import build
    from lowprec.train.loop import train
    from lowprec.train.signals import StopRequest

    class Killed(Exception):
        pass

    def kill(built):
        raise Killed

    def run(config, folder: Path, *, spoil=None, at=None, stop_at=None, kill_at=None, **options):
        built, actions = build(config, open_data(config)), dict(at or {})
        batches_from = built.batches_from
        if stop_at is not None:
            stop = options["stop"] = StopRequest()
            actions[stop_at] = lambda built: setattr(stop, "number", 15)
        if kill_at is not None:
            actions[kill_at] = kill

        def acting_batches(first):
            for step, batch in enumerate(batches_from(first), first):
                if step in actions:
                    actions[step](built)
                yield batch

        built.batches_from = acting_batches
        if spoil is not None:
            spoil(built)
        record = Record(folder)
        record.append("attempts", [{"attempt": record.attempt}])
        (folder / "config.yaml").write_text(json.dumps(asdict(config)))
        try:
            return train(built, record, **options), built
        except Killed:
            return None, built
        finally:
            record.close()

    return run


@pytest.fixture(scope="session")
def shaken():
    """`shaken(steps, factor)`: a `spoil` of `run_once` that multiplies losses of these steps."""

    def at(steps, factor=50.0):
        def spoil(built):
            plain, optimizer = built.task.loss, built.state.optimizer

            def loss(batch):
                value, scale = plain(batch)
                return value * (factor if int(optimizer.steps[0]) + 1 in steps else 1.0), scale

            built.task.loss = loss

        return spoil

    return at


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, canary, call=os.system):
        self.canary, self.call = str(canary), call

    def __reduce__(self):
        if self.call is os.system:
            return os.system, (f"touch {self.canary}",)
        if self.call is eval:
            return eval, (f"open({self.canary!r}, 'w').close()",)
        return self.call, (self.canary, "w")


@pytest.fixture
def payload():
    return Payload


@pytest.fixture
def canary(tmp_path):
    """A path that a payload would create; it must not exist when the test ends."""
    path = tmp_path / "canary"
    yield path
    assert not path.exists()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items):
    """Where there is a GPU, the kernels' tests are gpu tests, too; elsewhere those are skipped."""
    for item in items:
        if torch.cuda.is_available() and "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
        elif item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no GPU"))
