"""Ranks share an evaluation, and all of them find what one process does."""

import json

import pytest

BATCH = 5  # of the 24 validation samples: five batches, the last of four


@pytest.fixture(scope="module")
def results(ranks, make):
    """By kind and number of ranks: the scores of each rank and what they follow from."""
    results = {}
    kinds = {
        kind: {"distributed.name": kind, "evaluation.name": "both"} for kind in ("ddp", "fsdp2")
    }
    configs = {kind: make(changes) for kind, changes in kinds.items()}
    for size in (1, 3):
        answer = ranks("evaluation", size, configs=configs, batch=BATCH)
        assert answer["codes"] == [0] * size, answer["logs"]
        for kind in configs:
            files = [answer["folder"] / f"{kind}.{rank}.json" for rank in range(size)]
            results[kind, size] = [json.loads(file.read_text()) for file in files]
    return results


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_every_rank_scores_what_one_process_does_to_the_last_digit(results, kind):
    [one] = results["ddp", 1]
    assert len(one["scores"]) == 9
    for own in results[kind, 3]:
        assert own["scores"] == one["scores"]
        assert own["digests"] == one["digests"]  # of features, classes and captions, bit for bit


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_rank_encodes_its_share_as_often_as_the_others(results, kind):
    assert [own["encoded"] for own in results[kind, 1]] == [[5, 5, 5, 5, 4]]
    assert [own["encoded"] for own in results[kind, 3]] == [[5, 5], [5, 4], [5, 1]]
