"""The line of a measurement: what it holds, and what it says when there is no number."""

import json

import pytest
import torch

from experiments.benchmarks.measure import Lines, Unable, Wrong, check_error
from lowprec.nn.timing import median_ms

FIELDS = "slug device versions commit case shape dtype ms rate ratio_to ratio correct".split()
CPU = torch.device("cpu")


@pytest.fixture
def lines(tmp_path):
    return Lines(str(tmp_path), "ops", CPU, packages=("no-such-package",))


def written(tmp_path, slug="ops"):
    (file,) = (tmp_path / "bench" / slug).glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_line_holds_the_common_fields_and_rounded_numbers(lines, tmp_path, capsys):
    with lines.measurement("a", "2x3", "bf16", direction="up") as row:
        row.update(ms=1.23456789, rate=123456.789, ratio_to="b", ratio=2 / 3, slug="layer")
    [row] = written(tmp_path, "layer")
    assert list(row) == [*FIELDS, "direction"]
    assert (row["slug"], row["case"], row["correct"]) == ("layer", "a", True)
    assert (row["ms"], row["rate"], row["ratio"]) == (1.23457, 123457, 0.666667)
    assert row["versions"]["torch"] and row["versions"]["no-such-package"] is None
    table = capsys.readouterr().out
    assert "1.235 ms" in table and "0.667 x, saves -50.0% of b" in table


@pytest.mark.parametrize(
    ("error", "is_ours", "correct", "fails"),
    [
        (Wrong("too large"), True, False, True),
        (RuntimeError("too large\nsecond line"), True, None, True),
        (RuntimeError("too large"), False, None, False),
        (Unable("too large"), True, None, False),
    ],
)
def test_a_failure_has_no_number(lines, tmp_path, error, is_ours, correct, fails):
    with lines.measurement("a", "2x3", "bf16", is_ours=is_ours, dim=3) as row:
        row.update(ms=1.0, ratio=2.0)
        raise error
    assert not row
    [row] = written(tmp_path)
    assert row["ms"] is row["ratio"] is None
    assert (row["correct"], row["dim"]) == (correct, 3)
    assert row["reason"] == f"{type(error).__name__}: too large"
    assert bool(lines.failed) == fails


@pytest.mark.parametrize("value", [1.2, 1.0, float("nan")])
def test_error_outside_its_limits_is_wrong(value):
    expected = torch.ones(4)
    assert check_error("output", 1.1 * expected, expected, most=0.15, least=0.05) > 0.09
    with pytest.raises(Wrong, match="output"):
        check_error("output", value * expected, expected, most=0.15, least=0.05)


@pytest.mark.gpu
def test_graph_replays_a_call_on_a_gpu():
    x = torch.zeros((), device="cuda")
    assert median_ms(lambda: x.add_(1), x.device, 10, graph=True, cold=True) > 0
    assert x.item() == 3 + 3 + 10  # capture itself runs nothing
