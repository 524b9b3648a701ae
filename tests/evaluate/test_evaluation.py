"""Evaluation of a set with bad samples in it."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lowprec.data.loader import Batch
from lowprec.evaluate.evaluation import Evaluation


class Model(nn.Module):
    """Features that are the tokens and the mean pixels."""

    def __init__(self):
        super().__init__()
        self.visual = nn.Identity()
        self.weight = nn.Parameter(torch.zeros(1))

    def encode_image(self, pixels, normalize):
        return torch.nn.functional.one_hot(pixels[:, 0, 0, 0].long(), 4).float()

    def encode_text(self, tokens, normalize):
        return torch.nn.functional.one_hot(tokens[:, 0], 4).float()


def batch(numbers, skips):
    values = torch.tensor(numbers, dtype=torch.int64)
    images = values.to(torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    return Batch(images, values[:, None], values, values, [{}] * skips)


def evaluate(batches):
    evaluation = Evaluation(
        lambda: iter(batches), nn.Identity(), autocast=nullcontext, build_classifier=None,
        retrieval=True,
    )  # fmt: skip
    return evaluation(Model())


def test_a_batch_of_bad_samples_alone_is_left_out_and_counted():
    whole = evaluate([batch([0, 1], 0), batch([2], 0)])
    holed = evaluate([batch([0, 1], 0), batch([], 3), batch([2], 0)])
    assert holed == {**whole, "evaluation/skipped": 3}


def test_a_set_of_bad_samples_alone_is_an_error():
    with pytest.raises(ValueError, match="none of the 5 validation samples"):
        evaluate([batch([], 5)])
