import pytest
import torch

from lowprec.clip import open_clip
from lowprec.clip.model import build_model
from lowprec.clip.text import Tokenizer, build_classifier, imagenet
from lowprec.config.schema import ModelConfig

TEXTS = ["a photo of a dog", "Über-naïve café!", "word " * 50, ""]


def test_equals_open_clips_tokenizer():
    theirs = open_clip.tokenizer.SimpleTokenizer(context_length=16)
    assert torch.equal(Tokenizer(16)(TEXTS), theirs(TEXTS))


def test_small_vocabulary_keeps_start_and_end_largest():
    tokens = Tokenizer(16, vocab_size=512)(TEXTS)
    assert (tokens[:, 0] == 510).all() and (tokens.max(dim=1).values == 511).all()
    assert ((tokens == 511).sum(dim=1) == 1).all()


def test_imagenet_has_1000_names_and_80_templates():
    assert len(imagenet("classnames")) == 1000
    templates = imagenet("templates")
    assert len(templates) == 80 and all(t.count("{}") == 1 for t in templates)
    assert templates[0].format("dog") == "a bad photo of a dog."


def test_class_weight_is_the_normalized_mean_of_prompts():
    torch.manual_seed(0)
    config = ModelConfig(vision_width=64, vision_layers=1, text_width=64, text_layers=1)
    config.vocab_size, tokenizer = 512, Tokenizer(16, 512)
    model = build_model(config).eval()
    templates = ["a {} thing", "the {}"]
    weights = build_classifier(model, tokenizer, ["red", "blue"], templates)
    with torch.no_grad():
        features = model.encode_text(tokenizer(["a blue thing", "the blue"]), normalize=True)
    mean = features.mean(dim=0)
    torch.testing.assert_close(weights[:, 1], mean / mean.norm())
    assert weights.norm(dim=0).tolist() == pytest.approx([1.0, 1.0])
