import torch

from lowprec.clip import open_clip
from lowprec.clip.text import Tokenizer

TEXTS = ["a photo of a dog", "Über-naïve café!", "word " * 50, ""]


def test_equals_open_clips_tokenizer():
    theirs = open_clip.tokenizer.SimpleTokenizer(context_length=16)
    assert torch.equal(Tokenizer(16)(TEXTS), theirs(TEXTS))


def test_a_shrunk_vocabulary_keeps_start_and_end_the_largest():
    tokens = Tokenizer(16, vocab_size=512)(TEXTS)
    assert (tokens[:, 0] == 510).all() and (tokens.max(dim=1).values == 511).all()
    assert ((tokens == 511).sum(dim=1) == 1).all()


def test_one_text_is_a_batch_of_one():
    assert Tokenizer(8)("a cat").shape == (1, 8)
