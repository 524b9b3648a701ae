"""ImageNet's names and prompts, and the zero-shot classifier through open_clip's builder."""

from torch import Tensor, nn

from lowprec.clip.tokenizer import Tokenizer
from lowprec.clip.torchvision_shim import open_clip


def imagenet(kind: str) -> list[str]:
    """ImageNet's 1,000 `classnames` or CLIP's 80 `templates`, each with one `{}`."""
    if kind == "classnames":
        return list(open_clip.IMAGENET_CLASSNAMES)
    return [template("{}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES]


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
