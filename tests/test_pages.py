"""What the pages say is so: worked examples run, keys exist, numbers are those of the records."""

import importlib.util
import itertools
import json
import math
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import yaml
from omegaconf import OmegaConf
from pyarrow import parquet

from analysis.bench import load_lines
from analysis.run_files import flatten
from experiments.sweep import SweepConfig
from lowprec.config.compose import CONF, explain
from lowprec.config.schema import Config
from lowprec.data.shapes import render_shapes
from lowprec.runs.read import read_rows
from tests.small import python

ROOT = Path(__file__).parents[1]
FOLDERS = (".", "lowprec", "lowprec/*", "experiments", "analysis", "notebooks", "slurm")
FILES = sorted(file for folder in FOLDERS for file in ROOT.glob(f"{folder}/*.md"))
PAGES = [str(file.relative_to(ROOT)) for file in FILES if file.name != "CHANGELOG.md"]
RESULTS = [f"experiments/results/{file.name}" for file in ROOT.glob("experiments/results/*.md")]
EXAMPLES = {  # of CONTRIBUTING.md: what is there when it has run
    "A recipe": "runs/run/nano-custom-adamw-s0-*/layers.json",
    "A native format": "runs/run/nano-custom-adamw-s0-*/layers.json",
    "A statistic": "runs/run/nano-bf16-adamw-s0-*/tensors.parquet",
    "A number of the checkpoint": "runs/run/nano-bf16-adamw-s0-*/checkpoints/*/state.json",
    "A logger": "runs/run/nano-bf16-adamw-s0-*/metrics.jsonl",
    "A model": "runs/run/pico-bf16-adamw-s0-*/metrics.jsonl",
}
KEYS = flatten(asdict(Config())) | flatten(asdict(SweepConfig()))
GROUPS = {path.name for path in CONF.iterdir() if path.is_dir()}


def blocks(title: str) -> list[tuple[str, str]]:
    """(language, text) of each file in the fenced blocks under a heading of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.split(r"\n##+ ", text.partition(f"\n### {title}\n")[2])[0]
    found = re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL)
    return [(kind, part) for kind, text in found for part in re.split(r"\n(?=# \w+/)", text)]


def rows(page: str) -> list[list[str]]:
    """Cells of the table rows of a page of experiments/."""
    lines = (ROOT / "experiments" / page).read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:2] == "| "]


def change(file: Path, diff: str) -> None:
    """Replaces the lines with - by those with +; the first must be there once."""
    lines = diff.splitlines(keepends=True)[1:]
    old = "".join(line[1:] for line in lines if line.startswith("-"))
    new = "".join(line[1:] for line in lines if line.startswith("+"))
    assert file.read_text().count(old) == 1, old
    file.write_text(file.read_text().replace(old, new))


@pytest.fixture
def copy(tmp_path):
    leave_out = shutil.ignore_patterns("results", "__pycache__")
    for folder in ("lowprec", "experiments", "analysis", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=leave_out)
    render_shapes(tmp_path / "data" / "shapes", num_train=64, num_val=16)
    return tmp_path


def test_every_worked_example_is_known_and_has_at_most_20_lines_a_file():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^### (.+)$", text, re.M) == list(EXAMPLES)
    for title in EXAMPLES:
        for _, block in blocks(title):
            assert len([line for line in block.splitlines() if line.strip()]) <= 21, block


@pytest.mark.slow
@pytest.mark.parametrize("title", EXAMPLES)
def test_a_worked_example_runs(title, copy):
    for language, block in blocks(title):
        name = block.partition("\n")[0].removeprefix("# ")
        if language == "diff":
            change(copy / name, block)
        else:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_text(block)
    [command] = re.findall(r"```bash\n(.*) KEYS\n", (ROOT / "CONTRIBUTING.md").read_text())
    text = (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n### {title}\n")[2]
    keys = re.search(r"^Keys: `(.*)`$", text, re.M)[1]
    done = python(*command.split()[1:], *keys.split(), cwd=copy, PYTHONPATH=str(copy))
    assert done.returncode == 0, done.stderr[-3000:]
    [made] = copy.glob(EXAMPLES[title])
    if made.name == "layers.json":
        assert all(layer["swapped"] for layer in json.loads(made.read_text()))
    if made.name == "metrics.jsonl":
        assert len(made.read_text().splitlines()) == 2
    if made.name == "state.json":
        assert json.loads(made.read_text())["evaluations"] == 1
    if made.name == "tensors.parquet":
        assert any(name.startswith("moved/") for name in parquet.read_schema(made).names)


@pytest.mark.slow
def test_the_search_of_settings_trains_a_run_for_each_trial(copy, monkeypatch):
    text = (ROOT / "experiments" / "GUIDE.md").read_text()
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    losses = []

    def optimize(loss, n_trials):
        for number, lr in enumerate((1e-4, 1e-2, 1e-2, 1e-4)):  # a second search, the other way
            trial = SimpleNamespace(number=number % 2, suggest_float=lambda *a, lr=lr, **k: lr)
            losses.append(loss(trial))

    study = SimpleNamespace(optimize=optimize)
    monkeypatch.setitem(sys.modules, "optuna", SimpleNamespace(create_study=lambda: study))
    monkeypatch.chdir(copy)
    exec(example.replace('"num_steps=100"', '"num_steps=2", "precision=fp32", "num_workers=1"'), {})
    assert losses[:2] == losses[:1:-1] and len(set(losses)) == 2
    assert len(list(copy.glob("runs/search_*/*/metrics.jsonl"))) == 2


def in_file(file: Path, key: str):
    """The value that a config file, a sweep in it or the schema gives a key."""
    if file.suffix == ".py":
        return KEYS[key]
    config = OmegaConf.load(file)
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    inner = key.partition(".")[2]  # files of a group leave its name out
    in_group = file.parent.name != "experiment" and file.parent.name != "base"
    value = params.get(key)
    return OmegaConf.select(config, inner if in_group else key) if value is None else value


def test_the_protocol_is_in_the_files_that_its_table_names():
    table = [row for row in rows("PROTOCOL.md") if "=" in row[1]]
    assert sum(row[1].count("=") for row in table) >= 36
    for item, keys, file in table:
        for key, text in re.findall(r"`([\w.]+)=([^`]+)`", keys):
            value = in_file(ROOT / file.strip("`"), key)
            expected = yaml.safe_load(text) if "," not in text or text[0] == "[" else text
            if isinstance(expected, str) and re.fullmatch(r"[\d.]+e-?\d+", expected):
                expected = float(expected)  # YAML reads 2e-3 as text
            value = list(value) if isinstance(expected, list) else value
            assert value == expected, (item, key, value)


def test_every_key_of_a_page_is_one_of_the_schema():
    values = {name for group in GROUPS for name in files_of(group)}
    for page in PAGES:
        text = (ROOT / page).read_text()
        keys = re.findall(r"(?<![\w.])([a-z]\w+(?:\.\w+)+)=", text)
        if "OPEN_CLIP" in page:
            here = " ".join(row[1] for row in rows("FROM_OPEN_CLIP.md")[1:])
            keys += re.findall(r"`([a-z_]+(?:\.\w+)*)`", here)
        for key in keys:
            known = key in KEYS or key in GROUPS or key in values
            assert known or key.startswith(("hydra.", "torch.")), (page, key)


def test_the_list_of_keys_is_the_help_of_the_command():
    page = (ROOT / "experiments" / "KEYS.md").read_text()
    keys = explain("train", Config).partition("\n\nGroups")[0]
    assert f"```\n{keys}\n```\n" in page  # after a change of a key, paste them


def files_of(group: str) -> set[str]:
    return {path.stem for path in (CONF / group).glob("*.yaml")}


def test_every_flag_listed_is_one_of_open_clip():
    spec = importlib.util.find_spec("open_clip_train")
    source = (Path(spec.submodule_search_locations[0]) / "params.py").read_text()
    flags = re.findall(r"[\"'](--[a-z0-9-]+)[\"']", source)
    assert {row[0].strip("`") for row in rows("FROM_OPEN_CLIP.md")[1:]} > {"--train-data"}
    listed = re.findall(r"`(--[a-z0-9-]+)`", (ROOT / "experiments/FROM_OPEN_CLIP.md").read_text())
    assert set(listed) <= set(flags)


CASES = {  # in the tables of PERFORMANCE.md: of the lines
    "open_clip, blocks compiled": "open_clip",
    "ours, 16 bit": "high",
    "SwitchBack int8": "switchback",
    "SwitchBack fp8": "hw_fp8_switchback",
    "LLM.int8()": "llm_int8",
}
LAYERS = {
    **CASES,
    "SwitchBackM int8": "switchback_m",
    "fp8 in blocks (`hw_fp8_blockwise`)": "hw_fp8_blockwise",
    "tensor-wise fp8 (`hw_fp8_tensorwise`)": "hw_fp8_tensorwise",
    "torchao, tensor-wise fp8": "torchao_tensorwise",
    "torchao, row-wise fp8": "torchao_rowwise",
    "torchao, row-wise fp8, 16-bit weight gradients": "torchao_rowwise_with_gw_hp",
    "DINOv3's fp8 layer": "dinov3",
    "bitsandbytes SwitchBack (H100)": "bnb_switchback",
}
SHAPES = {  # the line's shape and patch dropout
    "H/14, batch 256, checkpointing": ("vit_h14 batch 256, checkpointing", 0.5),
    "H/14, batch 256": ("vit_h14 batch 256", 0.5),
    "L/14, batch 256": ("vit_l14 batch 256", 0.5),
    "L/14 without patch dropout": ("vit_l14 batch 256", 0.0),
    "B/32, batch 1,024": ("vit_b32 batch 1024", 0.5),
}


def test_the_speed_of_layers_is_that_of_their_newest_lines():
    results = ROOT / "experiments" / "results"
    older = load_lines(results, "layer")
    file = older.loc[older["case"] == "bnb_switchback", "file"].max()
    tables = [older[older["file"] == file], pd.DataFrame(read_rows(results / "layer_hopper.jsonl"))]
    graphs = [t[(t["mode"] == "graph") & (t["direction"] == "both")] for t in tables]
    at = ["dim", "case"]  # ratios are to nn.Linear of the same run
    older, lines = (t.drop_duplicates(at, keep="last").set_index(at)["ratio"] for t in graphs)
    table = iter(rows("PERFORMANCE.md"))
    head = next(row for row in table if row[1:2] == ["768"])
    body = list(itertools.takewhile(lambda row: row[0] in LAYERS, table))
    assert len(body) == len(LAYERS) - 2
    for name, *cells in body:
        ratios = older if "H100" in name else lines
        for dim, cell in zip(head[1:], cells, strict=True):
            dim = int(dim.replace(",", ""))
            ratio = ratios.get((dim, LAYERS[name]), math.nan)
            assert cell == ("-" if math.isnan(ratio) else f"{ratio:.2f}"), (name, dim)


@pytest.mark.parametrize(("slug", "unit"), [("model", "ms"), ("step", "images/s")])
def test_the_speed_of_models_is_that_of_the_newest_lines_beside_compiled_open_clip(slug, unit):
    lines = load_lines(ROOT / "experiments" / "results", slug)
    beside = lines.loc[lines["case"] == "open_clip", ["file", "shape"]].drop_duplicates()
    at = ["shape", "patch_dropout", "case"]
    lines = lines.merge(beside)
    lines = lines[lines["ms"].notna()].drop_duplicates(at, keep="last").set_index(at)
    table = iter(rows("PERFORMANCE.md"))
    head = next(row for row in table if row[0] == unit)
    body = list(itertools.takewhile(lambda row: row[0] in CASES, table))
    assert len(body) >= 4
    for name, *cells in body:
        for shape, cell in zip(head[1:], cells, strict=True):
            at = (*SHAPES[shape], CASES[name])
            if at not in lines.index:
                assert cell == "not measured", at
                continue
            line = lines.loc[at]
            number = f"{line['ms']:.0f}" if unit == "ms" else f"{line['rate']:,.0f}"
            ratios = [line["ratio"], line["ratio_to_high"]]
            words = " / ".join(f"{ratio:.2f}" for ratio in ratios if ratio == ratio)
            assert cell.replace("*", "") == f"{number}, {words}", at


def test_the_interface_lists_all_public_names():
    text = (ROOT / "lowprec" / "README.md").read_text()
    table = dict(re.findall(r"^\| \[`(lowprec\.\w+)`\]\S+ \| (.*) \|$", text, re.M))
    assert list(table) == [f"lowprec.{name}" for name in ("nn", "optim", "diagnostics", "ops")]
    for package, cell in table.items():
        names = importlib.import_module(package).__all__
        assert sorted(re.findall(r"`(\w+)`", cell)) == sorted(names), package


@pytest.mark.parametrize("page", ["lowprec/ops/README.md", "tests/optim/golden/README.md"])
def test_the_example_of_a_page_runs(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    [code] = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    exec(code, {})


@pytest.mark.parametrize("page", [*PAGES, *sorted(RESULTS)])
def test_links_of_a_page_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        if link.startswith("http"):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / page).parent / file if file else ROOT / page
        assert target.exists(), link
        heads = re.findall(r"^#+ (.+)$", target.read_text(), re.M) if anchor else []
        slugs = [re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads]
        assert not anchor or anchor in slugs, (link, slugs)
