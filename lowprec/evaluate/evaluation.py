"""Evaluation during training and after it: one pass over the validation pairs, two tasks."""

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lowprec.evaluate.metrics import recall_at, top_k_accuracy


class Evaluation:
    """`evaluation(model) -> {"zero_shot/top1": ..., "retrieval/image_to_text_r1": ...}`.

    `make_batches()` gives batches with uint8 `images`, `tokens` and `labels` (-1: none, left out of
    zero-shot). `build_classifier(model)` gives the weights [embed_dim, classes], or is None (no
    zero-shot); `retrieval` adds recall in both directions. Values are shares in [0, 1].
    The model runs uncompiled in evaluation mode under `autocast()`, and comes back in the mode it
    was in. Training's random state is not touched.

    In several processes `make_batches()` gives each its own batches, as many as the others: batch n
    of process r is number n * processes + r of the whole set. `each(make)` gives what each of them
    makes. The model runs once a batch, also an empty one: its forward may need all processes.
    """

    def __init__(
        self,
        make_batches: Callable[[], Iterable],
        normalize: nn.Module,
        *,
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        build_classifier: Callable[[nn.Module], Tensor] | None = None,
        retrieval: bool = False,
        each: Callable[[Callable], list] = lambda make: [make()],
    ):
        self.make_batches = make_batches
        self.normalize = normalize
        self.autocast = autocast
        self.build_classifier = build_classifier
        self.retrieval = retrieval
        self.each = each

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> dict[str, float]:
        """Evaluates a model that maps (images, tokens) to features of norm 1."""
        training = model.training
        model.eval()
        try:
            with torch.compiler.set_stance("force_eager"), self.autocast():
                return self._evaluate(model)
        finally:
            model.train(training)

    def _evaluate(self, model: nn.Module) -> dict[str, float]:
        own = []
        parameter = model.visual.conv1.weight if hasattr(model.visual, "conv1") else None
        parameter = next(model.parameters()) if parameter is None else parameter
        for batch in self.make_batches():
            count, pair = len(batch.labels), (batch.images, batch.tokens)
            images, tokens = (_at_least_one(t).to(parameter.device) for t in pair)
            pixels = self.normalize(images).to(parameter.dtype)
            image = model.encode_image(pixels, normalize=True).float()[:count]
            own.append([image, batch.labels, torch.tensor([len(batch.skips)])])
            if self.retrieval:
                text = model.encode_text(tokens, normalize=True).float()[:count]
                own[-1] += [tokens[:count], text]
        image_features, label, skips, *others = (
            torch.cat(part).to(parameter.device) for part in zip(*self._of_all(own), strict=True)
        )
        skipped = int(skips.sum())
        if not len(label):
            raise ValueError(f"none of the {skipped} validation samples can be read")
        results = {"evaluation/skipped": skipped} if skipped else {}
        if self.build_classifier is not None:
            classifier = self.build_classifier(model).float()
            results["zero_shot/top1"] = top_k_accuracy(image_features, classifier, label, 1)
            results["zero_shot/top5"] = top_k_accuracy(image_features, classifier, label, 5)
        if self.retrieval:
            tokens, texts = others
            caption = torch.unique(tokens, dim=0, return_inverse=True)[1]
            for k in (1, 5, 10):
                to_text, to_image = recall_at(image_features, texts, caption, k)
                results[f"retrieval/image_to_text_r{k}"] = to_text
                results[f"retrieval/text_to_image_r{k}"] = to_image
        return results

    def _of_all(self, own: list[list[Tensor]]) -> list[list[Tensor]]:
        """What the batches of all processes gave, on the host, in the order of the set."""
        by_process = self.each(lambda: [[part.cpu() for part in batch] for batch in own])
        return [batch for turn in zip(*by_process, strict=True) for batch in turn]


def _at_least_one(samples: Tensor) -> Tensor:
    return samples if len(samples) else samples.new_zeros(1, *samples.shape[1:])
