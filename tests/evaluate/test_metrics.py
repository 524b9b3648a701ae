"""Accuracy and recall against their definitions, written as loops."""

import pytest
import torch

from lowprec.evaluate.metrics import recall_at, top_k_accuracy


def test_top_k_counts_labeled_images_only():
    features = torch.eye(4)
    classifier = torch.eye(4)[:, [1, 0, 2, 3]]
    labels = torch.tensor([1, 0, 3, -1])
    assert top_k_accuracy(features, classifier, labels, 1) == pytest.approx(2 / 3)
    assert top_k_accuracy(features, classifier, labels, 10) == 1.0


def test_no_label_at_all_is_an_error():
    with pytest.raises(ValueError, match="cls"):
        top_k_accuracy(torch.eye(2), torch.eye(2), torch.tensor([-1, -1]), 1)


def test_recall_equals_a_loop_over_pairs():
    torch.manual_seed(0)
    images, caption = torch.randn(37, 8), torch.randint(0, 20, (37,))
    text_of = torch.randn(20, 8)
    texts = text_of[caption]
    for k in (1, 5):
        hits = 0
        present = caption.unique()
        for i in range(37):
            ranked = present[(images[i] @ text_of[present].T).argsort(descending=True)]
            hits += caption[i] in ranked[:k]
        back = 0
        for c in present:
            ranked = (text_of[c] @ images.T).argsort(descending=True)
            back += bool((caption[ranked[:k]] == c).any())
        to_text, to_image = recall_at(images, texts, caption, k)
        assert to_text == pytest.approx(hits / 37)
        assert to_image == pytest.approx(back / len(present))


def test_aligned_pairs_are_all_recalled():
    features = torch.eye(12)
    assert recall_at(features, features, torch.arange(12), 1) == (1.0, 1.0)
