"""CLIP's byte-pair encoding, with a cache of whole captions."""

from functools import lru_cache

import torch
from torch import Tensor

from lowprec.clip.torchvision_shim import open_clip


class Tokenizer:
    """`tokenizer(texts) -> int64 [len(texts), context_length]`: start, words, end, zeros.

    A caption that is too long is cut and still ends in the end token. With `vocab_size` below
    49,408 (tests) word ids are taken modulo size - 2, and start and end become the two largest ids:
    the text tower pools at the largest.
    """

    def __init__(self, context_length: int, vocab_size: int = 49408):
        self.context_length = context_length
        self.vocab_size = vocab_size
        self._bpe = open_clip.tokenizer.SimpleTokenizer(context_length=context_length)
        self._row = lru_cache(maxsize=65536)(self._encode)

    def __call__(self, texts: str | list[str]) -> Tensor:
        """Token ids of one caption or a list of them."""
        texts = [texts] if isinstance(texts, str) else texts
        return torch.tensor([self._row(text) for text in texts], dtype=torch.int64).reshape(
            len(texts), self.context_length
        )

    def _encode(self, text: str) -> tuple[int, ...]:
        words = self._bpe.encode(text)[: self.context_length - 2]
        if self.vocab_size < self._bpe.vocab_size:
            words = [word % (self.vocab_size - 2) for word in words]
        row = [self.vocab_size - 2, *words, self.vocab_size - 1]
        return tuple(row + [0] * (self.context_length - len(row)))
