"""The page of results agrees with the committed records."""

import re
from pathlib import Path

import pytest

from analysis import curves, load_runs

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
PAGE = (ROOT / "experiments" / "RESULTS.md").read_text()
PRECISIONS = {
    "bf16": "bf16",
    "SwitchBack int8": "switchback",
    "LLM.int8()": "llm_int8",
    "fp8 tensor-wise (fake-quantized)": "fp8_tensorwise",
    "SwitchBack fp8 (fake-quantized)": "fp8_switchback",
    "SwitchBack fp8 (hardware)": "hw_fp8_switchback",
    "`switchback_q`": "switchback_q",
    "fp8 in blocks of 128": "fp8_blockwise",
    "the same, multiplied in fp8 (`hw_fp8_blockwise`)": "hw_fp8_blockwise",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "NVFP4 with Hadamard rotation and stochastic rounding": "nvfp4_rht_sr",
}
OPTIMIZERS = {
    "AdamW": "adamw",
    "StableAdamW": "stable_adamw",
    "AdamW, gradient norm clipped at 4.0": "adamw_clip",
    "AdamW, ZClip": "adamw_zclip",
    "AdamW, SkipStep": "adamw_skip_step",
    "AdaGC": "adagc",
    "Muon": "muon",
    "StableSPAM": "stable_spam",
}
WARNINGS = {
    "AdamW, clipped at warnings": "clip",
    "AdamW, beta2 0.9 at warnings": "beta2",
    "AdamW, skipped at warnings": "skip",
}


def rows_of(start):
    """The cells of each row of the page's table whose header begins with `start`."""
    table = PAGE[PAGE.index(f"\n{start}") + 1 :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in table[2:]]


@pytest.fixture(scope="module")
def scores():
    """A function: mean R@1 of a study's runs with these settings, in %, by its archive."""
    tables = {}

    def mean(study, **settings):
        if study not in tables:
            runs = load_runs(RESULTS / study)
            scored = curves.with_scores(runs, curves.named_heads(runs)).set_index("run")
            tables[study] = runs.runs.set_index("run").assign(recall=scored["recall"])
        part = tables[study]
        for key, value in settings.items():
            column = part[key.replace("__", ".")]
            part = part[column.isna() if value is None else column == value]
        assert len(part) >= 3
        return part["recall"].mean()

    return mean


def test_the_table_of_verdicts_is_that_of_the_claims():
    lines = (RESULTS / "claims.md").read_text().splitlines()
    claims = [[cell.strip() for cell in line.split(" | ")] for line in lines if "| C" in line[:4]]
    judged = [(c[0].strip("| "), c[1], re.match(r"\*\*(.*?)\*\*", c[5])[1]) for c in claims]
    ours = [tuple(cells[:3]) for cells in rows_of("| | claim | verdict |")]
    own = [row for row in ours if row[0] == "C4"]
    assert [row[2] for row in own] == ["no verdict"]
    assert [row for row in ours if row not in own] == [row for row in judged if row[2] != "no runs"]


def test_the_records_stay_small():
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    assert len(files) <= 200 and sum(path.stat().st_size for path in files) <= 60e6


def test_accuracy_by_recipe_is_that_of_the_records(scores):
    model = ""
    for cells in rows_of("| model | recipe |"):
        model = cells[0].strip("`") or model
        if "float16" not in cells[1]:
            label = PRECISIONS[cells[1]]
            settings = {"model__name": model, "precision__label": label, "scaler__name": "none"}
            assert cells[2] == f"{scores('accuracy_vs_size_mini', **settings):.1f}%"
    for cells in rows_of("| recipe | mean R@1 |"):
        label = PRECISIONS[cells[0]]
        assert cells[1] == f"{scores('weight_gradient_mini', precision__label=label):.1f}%"


def test_accuracy_by_format_is_that_of_the_records(scores):
    for name, _, recall, *_ in rows_of("| format | bits |"):
        changes = name.startswith("NVFP4, from step 1,001")
        label = "nvfp4" if changes else PRECISIONS[name]
        settings = {"precision__label": label, "precision_change__step": 1001 if changes else None}
        assert recall == f"{scores('formats_mini', **settings):.1f}%"


def test_accuracy_by_optimizer_is_that_of_the_records(scores):
    for cells in rows_of("| optimizer | loss spikes in 3 runs |"):
        settings = {"optimizer__optim_bits": 32, "optimizer__on_warning__action": "none"}
        if cells[0] in WARNINGS:
            settings |= {"optimizer__name": "adamw"}
            settings["optimizer__on_warning__action"] = WARNINGS[cells[0]]
        elif "8 bits" in cells[0]:
            settings |= {"optimizer__name": "stable_adamw", "optimizer__optim_bits": 8}
        else:
            settings |= {"optimizer__name": OPTIMIZERS[cells[0]]}
        assert cells[7].startswith(f"{scores('optimizers_mini', **settings):.1f}% (")
    for cells in rows_of("| optimizer | beta2 |"):
        settings = {"optimizer__name": OPTIMIZERS[cells[0]], "optimizer__beta2": float(cells[1])}
        assert cells[7].startswith(f"{scores('stability_mini', **settings):.1f}% (")
