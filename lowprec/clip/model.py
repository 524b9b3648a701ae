"""open_clip's CLIP models, built from the config schema with open_clip's parameter names."""

from typing import Any

import torch
from torch import Tensor, nn

from lowprec.clip import open_clip
from lowprec.config.schema import PRESETS, ModelConfig, PrecisionConfig
from lowprec.nn.coverage import Layers
from lowprec.nn.recipe import RECIPES, custom_recipe
from lowprec.nn.replace import NoLayerError, apply_recipe

TEXT_HEAD_WIDTH = 64


class PatchDropout(nn.Module):
    """Keeps a random part of each image's patches in training, and always the class token.

    `[batch, 1 + patches, width] -> [batch, 1 + kept, width]`; kept = max(1, int(patches (1 - p))).
    Draws on the tensor's device; open_clip draws on the CPU, so that each step waits for a copy.
    Source: arXiv:2212.00794.

    With `batch_size`, that of the global batch, numbers are drawn for the whole batch, and
    consecutive forwards use the rows of this rank's consecutive micro-batches: the result depends
    on neither the number of ranks nor the micro-batches.
    """

    def __init__(
        self, probability: float, batch_size: int | None = None, rank: int = 0, num_ranks: int = 1
    ):
        super().__init__()
        self.probability, self.batch_size = probability, batch_size
        images = (batch_size or 0) // num_ranks
        self.begin, self.end = rank * images, (rank + 1) * images
        self.next, self.drawn = self.begin, None

    def forward(self, x: Tensor) -> Tensor:
        """Drops patches in training mode; returns x otherwise."""
        if not self.training:
            return x
        batch, tokens, width = x.shape
        num_kept = max(1, int((tokens - 1) * (1 - self.probability)))
        order = self._draw(batch, tokens - 1, x.device).topk(num_kept, dim=1).indices
        patches = x[:, 1:].gather(1, order[:, :, None].expand(-1, -1, width))
        return torch.cat((x[:, :1], patches), dim=1)

    def _draw(self, batch: int, patches: int, device: torch.device) -> Tensor:
        """One random number per image and patch: [batch, patches]."""
        if self.batch_size is None:
            return torch.rand(batch, patches, device=device)
        if self.next == self.begin:
            self.drawn = torch.rand(self.batch_size, patches, device=device)
        rows = self.drawn[self.next : self.next + batch]
        self.next = self.begin if self.next + batch == self.end else self.next + batch
        return rows


def build_model(config: ModelConfig, intervention: str = "none") -> nn.Module:
    """A newly initialized model; `model(images, tokens)` returns a dict of features and scale.

    images: normalized, float [batch, 3, image_size, image_size]; tokens: int64 [batch,
    context_length]. `image_features` and `text_features`: [batch, embed_dim] with norm 1.
    `intervention`: "none", "zero_init" (layer scale 0.0) or "kq_norm" (norm of keys and queries).
    """
    sizes = model_config(config, intervention)
    if config.name in PRESETS:
        model = open_clip.model.CLIP(**sizes, output_dict=True)
    else:
        model = open_clip.create_model(
            config.name,
            load_weights=False,
            pretrained_text=False,
            output_dict=True,
            **{key: sizes[key] for key in ("embed_dim", "vision_cfg", "text_cfg")},
        )
    if config.patch_dropout:
        model.visual.patch_dropout = PatchDropout(config.patch_dropout)
    return model


def model_config(config: ModelConfig, intervention: str = "none") -> dict[str, Any]:
    """The model in open_clip's own terms, as in its files of `model_configs`."""
    changes = {"zero_init": {"ls_init_value": 0.0}, "kq_norm": {"qk_norm": True}}
    changes = changes.get(intervention, {})
    if config.name not in PRESETS:
        return _named_config(config, changes)
    return {
        "embed_dim": config.embed_dim,
        "vision_cfg": {
            "image_size": config.image_size,
            "patch_size": config.patch_size,
            "width": config.vision_width,
            "layers": config.vision_layers,
            "head_width": config.heads,
            **changes,
        },
        "text_cfg": {
            "context_length": config.context_length,
            "vocab_size": config.vocab_size,
            "width": config.text_width,
            "layers": config.text_layers,
            "heads": config.text_width // TEXT_HEAD_WIDTH,
            **changes,
        },
    }


def _named_config(config: ModelConfig, changes: dict) -> dict[str, Any]:
    named = open_clip.get_model_config(config.name)

    def sizes(tower: str, *names: str) -> dict:
        own = {name: getattr(config, name) for name in names}
        own = {name: value for name, value in own.items() if value is not None}
        return {**named[tower], **changes, **own}

    return {
        **named,
        "embed_dim": config.embed_dim or named["embed_dim"],
        "vision_cfg": sizes("vision_cfg", "image_size", "patch_size"),
        "text_cfg": sizes("text_cfg", "context_length", "vocab_size"),
    }


class StableEmbedding(nn.Embedding):
    """Token embedding for 8-bit optimizers: `layer_norm(weight[tokens])`, Xavier-uniform weight.

    `lowprec.clip.export.fold` gives the equivalent plain embedding, which open_clip has.
    Source: the stable embedding layer, section 2.3, arXiv:2110.02861.
    """

    def __init__(self, num_tokens: int, width: int):
        super().__init__(num_tokens, width)
        self.norm = nn.LayerNorm(width)

    def reset_parameters(self) -> None:
        """Initializes the weights; torch calls it."""
        nn.init.xavier_uniform_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """int64 [...] -> [..., width]."""
        return self.norm(super().forward(input))


def use_stable_embedding(model: nn.Module) -> None:
    """Replaces a model's token embedding by a new StableEmbedding, in place.

    Raises ValueError if the text tower is not open_clip's own.
    """
    tower = getattr(model, "text", model)
    embedding = getattr(tower, "token_embedding", None)
    if not isinstance(embedding, nn.Embedding):
        raise ValueError("the text tower is not open_clip's own: it has no token_embedding")
    tower.token_embedding = StableEmbedding(embedding.num_embeddings, embedding.embedding_dim)


def set_precision(model: nn.Module, precision: PrecisionConfig) -> Layers:
    """Applies a recipe to the layers in `precision.where` of both towers, in place.

    Returns the layers, or nothing for recipe "high" and a model without such layers.
    Raises ValueError if there are no such layers for another recipe; see `apply_recipe`.
    """
    recipe = RECIPES.get(precision.recipe) or custom_recipe(precision.products)
    options = {k: getattr(precision, k) for k in ("backend", "outlier_threshold", "skip_slow")}
    inputs = None
    if recipe.function and hasattr(model, "visual"):  # a blank image and caption
        like, side = next(model.visual.parameters()), image_size(model)
        tokens = torch.zeros(1, model.context_length, dtype=torch.int64, device=like.device)
        inputs = like.new_zeros(1, 3, side, side), tokens
    try:
        return apply_recipe(model, recipe, precision.where, inputs=inputs, **options)
    except NoLayerError:
        if recipe.function:
            raise
        return Layers()


def blocks(model: nn.Module) -> list[nn.Module]:
    """The residual attention blocks of open_clip's own towers, vision first; no others."""
    towers = (model.visual, getattr(model, "text", model))
    transformers = [getattr(tower, "transformer", None) for tower in towers]
    return [block for t in transformers for block in getattr(t, "resblocks", ())]


def image_size(model: nn.Module) -> int:
    """Width and height, in pixels, of the images that the model expects."""
    size = model.visual.image_size
    return size[0] if isinstance(size, (tuple, list)) else size


def contrastive_loss(rank: int = 0, world_size: int = 1, local_loss: bool = False) -> nn.Module:
    """open_clip's symmetric cross entropy over the batch: `loss(**model(images, tokens))`, 0-d.

    With several processes, features are gathered with their gradients; with `local_loss`, each
    rank computes only its own rows of the loss.
    """
    return open_clip.loss.ClipLoss(
        local_loss=local_loss, gather_with_grad=True, rank=rank, world_size=world_size
    )


class Normalize(nn.Module):
    """uint8 [batch, 3, height, width] -> float32, with CLIP's mean and standard deviation."""

    def __init__(self):
        super().__init__()
        mean, std = open_clip.OPENAI_DATASET_MEAN, open_clip.OPENAI_DATASET_STD
        self.register_buffer("mean", torch.tensor(mean)[:, None, None] * 255)
        self.register_buffer("std", torch.tensor(std)[:, None, None] * 255)

    def forward(self, images: Tensor) -> Tensor:
        """Normalizes images on the module's device."""
        return (images.float() - self.mean) / self.std
