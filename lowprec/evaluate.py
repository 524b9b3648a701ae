"""Evaluates a model: zero-shot accuracy and retrieval recall, in one pass over validation pairs."""

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LOSS_BATCH = 1024  # pairs
NUM_NEAREST = 3  # captions of an image shown


@dataclass(eq=False)
class Evaluation:
    """Maps a model to `{"zero_shot/top1": ..., "retrieval/image_to_text_r1": ...}`.

    Values are shares in [0, 1], except `retrieval/loss`, the contrastive loss in batches of 1,024
    pairs. The model runs uncompiled and in evaluation mode. `build_classifier` maps the model to
    class weights [embed_dim, classes]; if it is None, there is no zero-shot evaluation.

    All processes make the same number of batches: batch n of process r is batch n * processes + r
    of the whole set. Batches may be empty. `each(make)` returns the results of `make()` in all
    processes, ordered by rank.
    """

    make_batches: Callable[[], Iterable]  # with uint8 `images`, `tokens`, `labels` (-1: unlabeled)
    normalize: nn.Module  # maps uint8 images to pixels
    _: KW_ONLY
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    build_classifier: Callable[[nn.Module], Tensor] | None = None
    retrieval: bool = False  # whether to measure the loss, and recall in both directions
    num_shown: int = 0  # images of which `nearest` is kept, at equal distances in the whole set
    each: Callable[[Callable], list] = lambda make: [make()]
    # after a call: the results of a model that guesses; by the sample number of an image shown,
    # those of its nearest captions
    chance: dict[str, float] = field(default_factory=dict, init=False)
    nearest: dict[int, list[int]] = field(default_factory=dict, init=False)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Evaluates a model that maps (images, tokens) to features of norm 1.

        The random state stays, although a recipe may round stochastically.
        """
        training, device = model.training, next(model.parameters()).device
        restored = torch.random.fork_rng([device] if device.type == "cuda" else [])
        model.eval()
        try:
            with torch.compiler.set_stance("force_eager"), restored, self.autocast():
                return self._evaluate(model)
        finally:
            model.train(training)

    def _evaluate(self, model: nn.Module) -> dict[str, float]:
        own = []  # of this process; with FSDP2, the model also runs on empty batches
        conv = getattr(model.visual, "conv1", None)
        parameter = next(model.parameters()) if conv is None else conv.weight
        for batch in self.make_batches():
            images, tokens, count = batch.images, batch.tokens, len(batch.labels)
            if not count:
                images, tokens = (t.new_zeros(1, *t.shape[1:]) for t in (images, tokens))
            images, tokens = images.to(parameter.device), tokens.to(parameter.device)
            pixels = self.normalize(images).to(parameter.dtype)
            image = model.encode_image(pixels, normalize=True).float()[:count]
            own.append([image, batch.labels, torch.tensor([len(batch.skips)])])
            if self.retrieval:
                text = model.encode_text(tokens, normalize=True).float()[:count]
                own[-1] += [tokens[:count], text, batch.samples]
        by_process = self.each(lambda: [[tensor.cpu() for tensor in batch] for batch in own])
        in_order = [batch for turn in zip(*by_process, strict=True) for batch in turn]
        image_features, labels, skips, *pairs = (
            torch.cat(tensors).to(parameter.device) for tensors in zip(*in_order, strict=True)
        )
        num_skipped = int(skips.sum())
        if not len(labels):
            raise ValueError(f"none of the {num_skipped} validation samples can be read")
        results = {"evaluation/skipped": num_skipped} if num_skipped else {}
        if self.build_classifier is not None:
            classifier = self.build_classifier(model).float()
            self.predictions = (image_features @ classifier).argmax(dim=1)
            for k in (1, 5):
                accuracy = top_k_accuracy(image_features, classifier, labels, k)
                results[f"zero_shot/top{k}"] = accuracy
                self.chance[f"zero_shot/top{k}"] = min(1, k / classifier.shape[1])
        if self.retrieval:
            tokens, text_features, samples = pairs
            scale = model.logit_scale.detach().float().exp()
            results["retrieval/loss"] = contrastive_loss(image_features, text_features, scale)
            self.chance["retrieval/loss"] = math.log(min(len(labels), LOSS_BATCH))
            unique, captions = torch.unique(tokens, dim=0, return_inverse=True)
            if num := min(self.num_shown, len(labels)):
                shown = torch.arange(num, device=labels.device) * len(labels) // num
                nearest = samples[nearest_captions(image_features[shown], text_features, captions)]
                self.nearest = dict(zip(samples[shown].tolist(), nearest.tolist(), strict=True))
            for k in (1, 5, 10):
                to_text, to_image = recall_at(image_features, text_features, captions, k)
                results[f"retrieval/image_to_text_r{k}"] = to_text
                results[f"retrieval/text_to_image_r{k}"] = to_image
                for name in ("image_to_text", "text_to_image"):
                    self.chance[f"retrieval/{name}_r{k}"] = min(1, k / len(unique))
        return results


def top_k_accuracy(features: Tensor, classifier: Tensor, labels: Tensor, k: int) -> float:
    """Returns the share of labeled images whose class is among the k nearest.

    `features`: [images, embed_dim]; `classifier`: [embed_dim, classes]; `labels`: int64 [images],
    -1 for unlabeled images. Raises ValueError if no image is labeled.
    """
    labeled = labels >= 0
    if not labeled.any():
        raise ValueError("zero-shot evaluation needs labels: no .cls member in data.val")
    features, labels = features[labeled], labels[labeled]
    top = (features @ classifier).topk(min(k, classifier.shape[1]), dim=1).indices
    return (top == labels[:, None]).any(dim=1).double().mean().item()


def recall_at(images: Tensor, texts: Tensor, captions: Tensor, k: int) -> tuple[float, float]:
    """Returns recall@k from image to text and from text to image.

    A query is a hit if a correct answer is among its k nearest. Equal captions count once.
    `images`, `texts`: features [pairs, embed_dim]; `captions`: int64 [pairs]. Pairs with the same
    caption have the same number, and each of them is a correct answer.
    """
    unique_captions, first = _first_of_each(captions)
    to_text = _hit_rate(images, captions, texts[first], unique_captions, k)
    to_image = _hit_rate(texts[first], unique_captions, images, captions, k)
    return to_text, to_image


def nearest_captions(images: Tensor, texts: Tensor, captions: Tensor) -> Tensor:
    """Returns the positions of the captions nearest to each image, int64 [images, NUM_NEAREST].

    Equal captions count once, as the first of them; if there are fewer, so are the columns.
    `images`: features [images, embed_dim]; `texts` and `captions` as in `recall_at`.
    """
    _, first = _first_of_each(captions)
    return first[(images @ texts[first].T).topk(min(NUM_NEAREST, len(first)), dim=1).indices]


def _first_of_each(captions: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct numbers, and the first position of each."""
    unique, inverse = captions.unique(return_inverse=True)
    positions = torch.arange(len(captions), device=captions.device)
    first = torch.full_like(unique, len(captions))
    return unique, first.scatter_reduce(0, inverse, positions, reduce="amin")


def contrastive_loss(
    images: Tensor, texts: Tensor, scale: Tensor, batch_size: int = LOSS_BATCH
) -> float:
    """Returns CLIP's symmetric cross entropy, averaged over consecutive batches of pairs.

    A smaller last batch, which would be easier, is left out unless it is the only one.
    `images`, `texts`: features of norm 1, [pairs, embed_dim]; `scale`: the logit scale, 0-d.
    """
    losses = []
    for i in range(0, max(len(images) - batch_size, 0) + 1, batch_size):
        logits = scale * images[i : i + batch_size] @ texts[i : i + batch_size].T
        correct = torch.arange(len(logits), device=logits.device)
        losses.append((F.cross_entropy(logits, correct) + F.cross_entropy(logits.T, correct)) / 2)
    return torch.stack(losses).mean().item()


def _hit_rate(queries: Tensor, query_ids: Tensor, pool: Tensor, pool_ids: Tensor, k: int) -> float:
    hits = 0
    for chunk_queries, ids in zip(queries.split(1024), query_ids.split(1024), strict=True):
        nearest = (chunk_queries @ pool.T).topk(min(k, len(pool)), dim=1).indices
        hits += (pool_ids[nearest] == ids[:, None]).any(dim=1).sum().item()
    return hits / len(queries)
