"""Ranks share an evaluation, and all of them find what one process does."""

import functools
import json

import pytest
import torch

BATCH = 5  # of the 24 validation samples: five batches, the last of four


SIZES = (1, 3)
KINDS = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def results(ranks, make, once):
    """By kind and number of ranks: the scores of each rank and what they follow from."""
    folder = once("evaluations", functools.partial(evaluate_all, ranks, make))
    files = {
        (kind, size): [folder / str(size) / f"{kind}.{rank}.json" for rank in range(size)]
        for kind in KINDS
        for size in SIZES
    }
    return {key: [json.loads(path.read_text()) for path in paths] for key, paths in files.items()}


def evaluate_all(ranks, make, folder):
    both = {"evaluation.name": "both"}
    configs = {kind: make({"distributed.name": kind, **both}) for kind in KINDS}
    for size in SIZES:
        ranks("evaluation", size, folder=folder / str(size), configs=configs, batch=BATCH)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_scores_what_one_process_does_to_the_last_digit(results, kind):
    [one] = results["ddp", 1]
    assert len(one["scores"]) == 9
    for own in results[kind, 3]:
        assert own["scores"] == one["scores"]
        assert own["digests"] == one["digests"]  # of features, classes and captions, bit for bit


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_encodes_its_share_as_often_as_the_others(results, kind):
    assert [own["encoded"] for own in results[kind, 1]] == [[5, 5, 5, 5, 4]]
    assert [own["encoded"] for own in results[kind, 3]] == [[5, 5], [5, 4], [5, 1]]


def test_after_replays_of_a_graph_an_evaluation_gathers_parameters_anew(ranks, make):
    """FSDP2 keeps them gathered after a forward pass without a backward pass."""
    raw = make({"distributed.name": "fsdp2", "evaluation.name": "both"})
    folder = ranks("replays", 2, raw=raw)["folder"]
    for rank in range(2):
        (blocks, scores), (expected, expected_scores) = torch.load(folder / f"{rank}.pt")
        assert torch.equal(blocks.nan_to_num(), expected.nan_to_num())
        assert scores == expected_scores
