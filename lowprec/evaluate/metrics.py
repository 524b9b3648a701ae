"""Zero-shot accuracy and retrieval recall from features."""

import torch
from torch import Tensor


def top_k_accuracy(features: Tensor, classifier: Tensor, labels: Tensor, k: int) -> float:
    """Share of images whose class is among the k nearest classes.

    features [images, embed_dim]; classifier [embed_dim, classes]; labels int64 [images], -1 for
    none (left out). k is cut to the number of classes. No labeled image: ValueError.
    """
    labeled = labels >= 0
    if not labeled.any():
        raise ValueError("zero-shot evaluation needs labels: no .cls member in data.val")
    features, labels = features[labeled], labels[labeled]
    top = (features @ classifier).topk(min(k, classifier.shape[1]), dim=1).indices
    return (top == labels[:, None]).any(dim=1).double().mean().item()


def recall_at(images: Tensor, texts: Tensor, caption: Tensor, k: int) -> tuple[float, float]:
    """Share of queries with a right answer among the k nearest: image to text, text to image.

    images, texts [pairs, embed_dim]; caption int64 [pairs]: pairs with the same caption have the
    same number, and any of them is a right answer. Texts are unique when they are searched.
    """
    _, first = _first_of_each(caption)
    unique_texts, unique_caption = texts[first], caption[first]
    to_text = _hits(images, caption, unique_texts, unique_caption, k)
    to_image = _hits(unique_texts, unique_caption, images, caption, k)
    return to_text, to_image


def _first_of_each(caption: Tensor) -> tuple[Tensor, Tensor]:
    values, inverse = caption.unique(return_inverse=True)
    first = torch.full_like(values, len(caption))
    places = torch.arange(len(caption), device=caption.device)
    return values, first.scatter_reduce(0, inverse, places, reduce="amin")


def _hits(
    queries: Tensor, query_ids: Tensor, pool: Tensor, pool_ids: Tensor, k: int, chunk: int = 1024
) -> float:
    hits = 0
    for part, ids in zip(queries.split(chunk), query_ids.split(chunk), strict=True):
        nearest = (part @ pool.T).topk(min(k, len(pool)), dim=1).indices
        hits += (pool_ids[nearest] == ids[:, None]).any(dim=1).sum().item()
    return hits / len(queries)
