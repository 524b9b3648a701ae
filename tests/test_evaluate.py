"""Accuracy and recall equal their definitions; unreadable samples are left out and counted."""

import math

import pytest
import torch
from torch import nn

from lowprec.data.loader import Batch
from lowprec.evaluate import Evaluation, contrastive_loss, recall_at, top_k_accuracy


def test_top_k_counts_labeled_images_only():
    features = torch.eye(4)
    classifier = torch.eye(4)[:, [1, 0, 2, 3]]
    labels = torch.tensor([1, 0, 3, -1])
    assert top_k_accuracy(features, classifier, labels, 1) == pytest.approx(2 / 3)
    assert top_k_accuracy(features, classifier, labels, 10) == 1.0
    with pytest.raises(ValueError, match="cls"):
        top_k_accuracy(features, classifier, torch.full((4,), -1), 1)


@pytest.mark.parametrize("k", [1, 5])
def test_recall_equals_a_loop_over_pairs(k):
    images, captions = torch.randn(37, 8), torch.randint(0, 20, (37,))
    text_of = torch.randn(20, 8)
    present = captions.unique()
    to_text = to_image = 0
    for i in range(37):
        ranked = present[(images[i] @ text_of[present].T).argsort(descending=True)]
        to_text += captions[i] in ranked[:k]
    for caption in present:
        ranked = (text_of[caption] @ images.T).argsort(descending=True)
        to_image += bool((captions[ranked[:k]] == caption).any())
    recalls = recall_at(images, text_of[captions], captions, k)
    assert recalls == pytest.approx((to_text / 37, to_image / len(present)))


def test_validation_loss_is_the_mean_over_full_batches():
    images, texts = torch.randn(2, 10, 8).div(3).unbind()
    losses = []
    for start in (0, 4):  # the last batch of two pairs is left out
        logits = 5 * images[start : start + 4] @ texts[start : start + 4].T
        rows, columns = logits.log_softmax(1).diag(), logits.log_softmax(0).diag()
        losses.append(-(rows.mean() + columns.mean()) / 2)
    loss = contrastive_loss(images, texts, torch.tensor(5.0), batch_size=4)
    assert loss == pytest.approx(sum(losses).item() / 2)
    assert contrastive_loss(images, texts, torch.tensor(0.0)) == pytest.approx(math.log(10))


class TokenModel(nn.Module):
    """Encodes a pair as its token and its mean pixel."""

    def __init__(self):
        super().__init__()
        self.visual = nn.Identity()
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def encode_image(self, pixels, normalize):
        return torch.nn.functional.one_hot(pixels[:, 0, 0, 0].long(), 4).float()

    def encode_text(self, tokens, normalize):
        return torch.nn.functional.one_hot(tokens[:, 0], 4).float()


def batch_of(numbers, num_skips):
    values = torch.tensor(numbers, dtype=torch.int64)
    images = values.to(torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    return Batch(images, values[:, None], values, values, [{}] * num_skips)


def test_stochastic_rounding_leaves_the_random_state_of_training():
    class Rounding(TokenModel):
        def encode_image(self, pixels, normalize):
            return super().encode_image(pixels + torch.rand_like(pixels.float()), normalize)

    state = torch.get_rng_state()
    batches = [batch_of([0, 1, 2, 3], 0)]
    Evaluation(lambda: iter(batches), nn.Identity(), retrieval=True)(Rounding())
    assert torch.equal(torch.get_rng_state(), state)


def evaluate(batches):
    return Evaluation(lambda: iter(batches), nn.Identity(), retrieval=True)(TokenModel())


def test_chance_is_the_score_of_a_guess():
    model = Evaluation(
        lambda: iter([batch_of([0, 1, 2, 2], 0)]),
        nn.Identity(),
        build_classifier=lambda model: torch.eye(4),
        retrieval=True,
    )
    scores = model(TokenModel())
    assert model.chance["zero_shot/top1"] == 0.25 and model.chance["zero_shot/top5"] == 1
    assert model.chance["retrieval/image_to_text_r1"] == pytest.approx(1 / 3)  # distinct captions
    assert model.chance["retrieval/loss"] == pytest.approx(math.log(4))  # pairs
    assert scores.keys() == model.chance.keys()


def test_unreadable_samples_are_left_out_and_counted():
    whole = evaluate([batch_of([0, 1], 0), batch_of([2], 0)])
    with_empty_batch = evaluate([batch_of([0, 1], 0), batch_of([], 3), batch_of([2], 0)])
    assert with_empty_batch == {**whole, "evaluation/skipped": 3}
    with pytest.raises(ValueError, match="none of the 5 validation samples"):
        evaluate([batch_of([], 5)])


def test_images_at_equal_distances_have_their_nearest_captions_once():
    batches = [batch_of([3, 0, 2, 2, 1], 0)]  # the numbers of samples, and of captions
    evaluation = Evaluation(lambda: iter(batches), nn.Identity(), retrieval=True, num_shown=2)
    evaluation(TokenModel())
    assert {image: captions[0] for image, captions in evaluation.nearest.items()} == {3: 3, 2: 2}
    assert all(len({*captions}) == 3 for captions in evaluation.nearest.values())
    evaluation.num_shown = 9
    evaluation(TokenModel())
    assert evaluation.nearest.keys() == {0, 1, 2, 3}  # at most all
