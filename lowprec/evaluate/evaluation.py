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
    """

    def __init__(
        self,
        make_batches: Callable[[], Iterable],
        normalize: nn.Module,
        *,
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        build_classifier: Callable[[nn.Module], Tensor] | None = None,
        retrieval: bool = False,
    ):
        self.make_batches = make_batches
        self.normalize = normalize
        self.autocast = autocast
        self.build_classifier = build_classifier
        self.retrieval = retrieval

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
        images, texts, tokens, labels, skipped = [], [], [], [], 0
        parameter = model.visual.conv1.weight if hasattr(model.visual, "conv1") else None
        parameter = next(model.parameters()) if parameter is None else parameter
        for batch in self.make_batches():
            skipped += len(batch.skips)
            if not len(batch.labels):  # all of them were bad
                continue
            batch = batch.to(parameter.device)
            pixels = self.normalize(batch.images).to(parameter.dtype)
            images.append(model.encode_image(pixels, normalize=True).float())
            labels.append(batch.labels)
            if self.retrieval:
                texts.append(model.encode_text(batch.tokens, normalize=True).float())
                tokens.append(batch.tokens)
        if not images:
            raise ValueError(f"none of the {skipped} validation samples can be read")
        image_features, label = torch.cat(images), torch.cat(labels)
        results = {"evaluation/skipped": skipped} if skipped else {}
        if self.build_classifier is not None:
            classifier = self.build_classifier(model).float()
            results["zero_shot/top1"] = top_k_accuracy(image_features, classifier, label, 1)
            results["zero_shot/top5"] = top_k_accuracy(image_features, classifier, label, 5)
        if self.retrieval:
            caption = torch.unique(torch.cat(tokens), dim=0, return_inverse=True)[1]
            for k in (1, 5, 10):
                to_text, to_image = recall_at(image_features, torch.cat(texts), caption, k)
                results[f"retrieval/image_to_text_r{k}"] = to_text
                results[f"retrieval/text_to_image_r{k}"] = to_image
        return results
