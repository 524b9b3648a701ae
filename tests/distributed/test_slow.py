"""Compiled blocks under several processes."""

import pytest

from lowprec.runs.read import find_runs, read_rows


@pytest.mark.slow
def test_compiled_and_recomputed_blocks_give_the_losses_of_one_eager_process(ranks, make):
    eager = make({"name": "eager"})
    assert ranks("train", 1, configs=[eager])["codes"] == [0]
    expected = [row["loss"] for row in rows_of(eager)]
    for kind in ("ddp", "fsdp2"):
        for recomputed in (False, True):
            name = f"{kind}_{recomputed}"
            config = make({"name": name, "distributed.name": kind, "compile": True,
                           "checkpointing": recomputed})  # fmt: skip
            answer = ranks("train", 2, configs=[config])
            assert answer["codes"] == [0, 0], answer["logs"]
            assert [row["loss"] for row in rows_of(config)] == pytest.approx(expected, rel=1e-4)


def rows_of(config):
    [run] = find_runs(f"{config['run_dir']}/{config['name']}")
    return read_rows(run / "metrics.jsonl")
