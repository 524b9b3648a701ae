"""Text for CLIP: the tokenizer, ImageNet's prompts and the zero-shot classifier."""

from functools import cache, lru_cache

import torch
from torch import Tensor, nn

from lowprec.clip import open_clip


@cache
def _byte_pairs() -> open_clip.tokenizer.SimpleTokenizer:
    return open_clip.tokenizer.SimpleTokenizer()  # takes 0.1 s


class Tokenizer:
    """CLIP's byte-pair encoding: `tokenizer(texts) -> int64 [len(texts), context_length]`.

    A row holds the start token, the words (truncated if too long), the end token and zeros. With
    `vocab_size` below 49,408, word ids are taken modulo `vocab_size - 2`, and start and
    end are the two largest ids, because the text tower pools at the largest. Caches captions.
    """

    def __init__(self, context_length: int, vocab_size: int = 49408):
        self.context_length = context_length
        self.vocab_size = vocab_size
        self._bpe = _byte_pairs()
        self._row = lru_cache(maxsize=65536)(self._encode)

    def __call__(self, texts: str | list[str]) -> Tensor:
        """Token ids of one caption or of a list of captions."""
        texts = [texts] if isinstance(texts, str) else texts
        rows = [self._row(text) for text in texts]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), self.context_length)

    def _encode(self, text: str) -> tuple[int, ...]:
        words = self._bpe.encode(text)[: self.context_length - 2]
        if self.vocab_size < self._bpe.vocab_size:
            words = [word % (self.vocab_size - 2) for word in words]
        row = [self.vocab_size - 2, *words, self.vocab_size - 1]
        return tuple(row + [0] * (self.context_length - len(row)))


def imagenet(kind: str) -> list[str]:
    """ImageNet's 1,000 "classnames", or CLIP's 80 "templates" with a `{}` each."""
    if kind == "classnames":
        return list(open_clip.IMAGENET_CLASSNAMES)
    return [template("{}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]


def build_classifier(
    model: nn.Module, tokenizer: Tokenizer, classnames: list[str], templates: list[str]
) -> Tensor:
    """Float [embed_dim, classes] with norm 1: each class's mean text feature over the templates.

    The model must be in evaluation mode. Runs on the model's device, 50 classes at a time.
    """
    device = next(model.parameters()).device
    return open_clip.build_zero_shot_classifier(
        model, tokenizer, classnames, templates, num_classes_per_batch=50, device=device
    )
