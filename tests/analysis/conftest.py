import errno
import functools
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from analysis import evidence, load_runs
from analysis.load import load_all
from lowprec.config.schema import Config, ModelConfig, OptimizerConfig, PrecisionConfig
from lowprec.runs.identity import directory
from lowprec.runs.read import encode_row
from lowprec.runs.record import Record

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # in C where there is libyaml
TENSORS = ["visual.conv1.weight", "visual.proj", "transformer.resblocks.0.mlp.c_fc.weight"]


def drawn(module, frame):
    """The axes of a figure drawn from a frame."""
    figure = Figure(layout="constrained")
    module.draw(frame, figure)
    figure.draw_without_rendering()
    return figure.axes


def legend(ax):
    """The names in the legend of a panel's figure, or beside the lines of its panels."""
    texts = [text for each in ax.figure.axes for text in each.texts]
    names = [text for text in texts if text.get_gid() == "name"]
    return [text.get_text() for each in ax.figure.legends for text in each.get_texts()] or [
        text.get_text().replace("\n", " ") for text in names
    ]


def points(ax, marker):
    """The steps of the points drawn with a marker, by line."""
    return [list(line.get_xdata()) for line in ax.get_lines() if line.get_marker() == marker]


def spiking(num_steps, at, height=1.0, length=3):
    """Losses about 2 with spikes that begin at some steps."""
    losses = 2 + 0.01 * np.sin(np.arange(num_steps))
    for step in at:
        losses[step - 1 : step - 1 + length] += height
    return losses


def write_rows(path, rows):
    """Writes a .jsonl file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(map(encode_row, rows)))


@pytest.fixture(scope="session", autouse=True)
def planned_once():
    """The files of studies, which no test changes, are composed once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "planned", functools.cache(evidence.planned))
        yield


@pytest.fixture
def query(tmp_path):
    """A function: a figure's frame of the runs made so far."""
    return lambda module: module.query(load_runs(tmp_path / "runs"))


def make_run(
    root: Path,
    *,
    model: str = "nano",
    optimizer: str = "adamw",
    recipe: str = "high",
    products: dict | None = None,
    num_steps: int = 400,
    beta2: float = 0.99,
    beta2_decay: float | None = None,
    clip_norm: float | None = None,
    clip_threshold: float | None = None,
    optim_bits: int = 32,
    lr: float = 1e-3,
    autocast: str = "bf16",
    data: str = "ab" * 32,
    gpu: str | None = None,
    **keys,
) -> Path:
    """A run directory as training writes it.

    `keys` are keys of the config's root and arguments of `write_record`.
    """
    written = {name: keys.pop(name) for name in RECORDED & keys.keys()}
    keys = {"experiment": "loss_curves", "scale": "demo", "batch_size": 128, **keys}
    config = Config(
        run_dir=str(root),
        num_steps=num_steps,
        model=ModelConfig(name=model),
        optimizer=OptimizerConfig(
            optimizer,
            lr,
            beta2=beta2,
            beta2_decay=beta2_decay,
            clip_norm=clip_norm,
            clip_threshold=clip_threshold,
            optim_bits=optim_bits,
        ),
        precision=PrecisionConfig(recipe=recipe, autocast=autocast, products=products),
        **keys,
    )
    run = directory(config, {"data": data})
    record = Record(run)
    (run / "config.yaml").write_text(yaml.dump(asdict(config), Dumper=DUMPER, sort_keys=False))
    record.append("attempts", [{"attempt": 0, "sources": {"data": data}, "gpu": gpu}])
    write_record(record, config, **written)
    record.close()
    return run


def write_record(
    record: Record,
    config: Config,
    *,
    steps: int | None = None,
    state: str = "finished",
    flush: int = 20,
    losses: np.ndarray | None = None,
    columns: dict[str, np.ndarray] | None = None,
    tables: dict[str, dict[str, pd.DataFrame]] | None = None,
) -> None:
    """Writes the steps of a run; those of a diverged run end with a loss of NaN.

    `columns` are further columns of metrics.jsonl, one element per step. `tables` maps each table
    to its statistics (default: `some_tables`), indexed by recorded step, a column per tensor.
    """
    steps = config.num_steps if steps is None else steps
    if losses is None:
        noise = np.random.default_rng(config.seed).normal(0, 0.1, steps)
        losses = 0.5 + 4.4 * np.exp(-np.arange(steps) / (steps / 4 + 1)) + noise
    losses = np.array(losses[:steps], dtype=float)
    if state == "diverged":
        losses[-1] = np.nan
    rows = [{"step": i + 1, "loss": loss, "lr": 1e-3} for i, loss in enumerate(losses)]
    for name, values in (columns or {}).items():
        values = np.asarray(values).tolist()
        rows = [{**row, name: value} for row, value in zip(rows, values, strict=False)]
    if state == "finished":
        rows[-1] = {"zero_shot/top1": 0.5} | rows[-1]
    tables = some_tables(steps) if tables is None else tables
    for start in range(0, steps, flush):
        some = rows[start : start + flush]
        record.append("metrics", some)
        record.append("timing", [{"step": some[-1]["step"], "attempt": 0, "wall_s": 0.1}])
        numbers = [row["step"] for row in some]
        for table, statistics in tables.items():
            parts = {name: frame[frame.index.isin(numbers)] for name, frame in statistics.items()}
            first = next(iter(parts.values()))
            if len(first):
                values = {name: part.to_numpy() for name, part in parts.items()}
                record.append_tensors(first.index.to_numpy(), values, list(first.columns), table)
    if state == "diverged":
        record.append("events", [{"step": steps, "diverged": "the loss is nan"}])
    if state in ("finished", "diverged"):
        record.write_parquet()
    record.status(state, steps, "loss is nan" if state == "diverged" else "")


RECORDED = {"steps", "state", "flush", "losses", "columns", "tables"}


def some_tables(steps: int) -> dict[str, dict[str, pd.DataFrame]]:
    """Two statistics of three tensors, which grow with the step."""
    numbers = np.arange(1, steps + 1)
    rms = pd.DataFrame(numbers[:, None] + np.array([0.0, 0.25, 0.5]), numbers, TENSORS)
    return {"tensors": {"rms": rms, "grad_norm": rms * 10}}


@pytest.fixture(scope="session")
def write_run():
    """The function `make_run` above, for fixtures that many tests share."""
    return make_run


@pytest.fixture(name="make_run")
def make_run_fixture(tmp_path):
    def make(**keys) -> Path:
        return make_run(tmp_path / "runs", **keys)

    return make


@pytest.fixture
def no_pictures(monkeypatch):
    """Pictures are drawn but written as empty files: writing them takes most of the time."""
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)


@pytest.fixture
def fill_disk(monkeypatch):
    """A function that fills the disk; then it takes four bytes of each file."""
    write = os.write

    def fill(descriptor, data):
        if len(data) > 4:
            write(descriptor, bytes(data[:4]))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    return lambda: monkeypatch.setattr(os, "write", fill)


@pytest.fixture(scope="session")
def everything():
    """All runs of the committed records."""
    return load_all(Path(__file__).parents[2] / "experiments" / "results")
