"""Class names, prompt templates and the zero-shot classifier, through open_clip's builder."""

from pathlib import Path

from torch import Tensor, nn

from lowprec.clip.tokenizer import Tokenizer
from lowprec.clip.torchvision_shim import open_clip


def read_names(source: str, kind: str) -> list[str]:
    """Lines of a file, or for source "imagenet" the names or templates of ImageNet.

    `kind`: "classnames" (1,000 for ImageNet) or "templates" (80; each holds `{}`). Empty lines are
    left out. A template without `{}` or an empty file raises ValueError.
    """
    if source == "imagenet":
        if kind == "classnames":
            return list(open_clip.IMAGENET_CLASSNAMES)
        return [template("{}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]
    lines = [line.strip() for line in Path(source).read_text().splitlines()]
    names = [line for line in lines if line]
    if not names:
        raise ValueError(f"data.{kind}={source}: the file has no line")
    bad = [name for name in names if kind == "templates" and name.count("{}") != 1]
    if bad:
        raise ValueError(f"data.templates={source}: a template needs one {{}}: {bad[0]!r}")
    return names


def build_classifier(
    model: nn.Module, tokenizer: Tokenizer, classnames: list[str], templates: list[str]
) -> Tensor:
    """Float [embed_dim, classes]: the mean text feature of each class over its templates, norm 1.

    The model should be in evaluation mode.
    """
    device = next(model.parameters()).device
    return open_clip.build_zero_shot_classifier(
        model, tokenizer, classnames, templates, num_classes_per_batch=50, device=device
    )
