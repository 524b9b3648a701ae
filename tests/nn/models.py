"""Small models of open_clip, timm, transformers and torch alone, in one table."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from lowprec.clip import open_clip
from lowprec.nn.recipe import LINEAR_LAYERS

timm = open_clip.timm_model.timm
VISION = dict(image_size=32, patch_size=8, width=64, layers=2, head_width=32)
TEXT = dict(context_length=8, vocab_size=64, width=64, heads=2, layers=2)
VIT = dict(img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2)
SMALL = dict(embed_dim=32, num_heads=2, depth=1, patch_size=8)  # of a timm model by name


def pair():
    """Images [4, 3, 32, 32] and tokens [4, 8], always the same."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, 63, (4, 8), generator=generator)
    tokens[:, -1] = 63
    return torch.randn(4, 3, 32, 32, generator=generator), tokens


def clip(vision=None, text=None):
    return open_clip.model.CLIP(32, VISION | (vision or {}), TEXT | (text or {}))


def block(width=64, custom=False):
    """open_clip's residual block, as a model."""
    torch.manual_seed(0)
    transformer = open_clip.transformer
    kind = transformer.CustomResidualAttentionBlock if custom else None
    return nn.Sequential(OrderedDict(block=(kind or transformer.ResidualAttentionBlock)(width, 2)))


def mlp_of(activation=None, *more):
    return nn.Sequential(nn.Linear(64, 256), activation or nn.GELU(), *more, nn.Linear(256, 64))


class Subclass(torch.Tensor):
    """A stand-in for torchao's quantized weights."""


def with_subclass_weight(layer):
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Subclass))
    return layer


def clip_with_trunk():
    model = clip()
    model.visual = timm.models.VisionTransformer(**VIT, num_classes=32)

    def set_grad_checkpointing(on):
        model.visual.set_grad_checkpointing(on)
        model.transformer.grad_checkpointing = on

    model.set_grad_checkpointing = set_grad_checkpointing
    return model


def by_name(name, **sizes):
    return lambda: timm.create_model(name, img_size=32, **(sizes or SMALL))


def transformers_clip():
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(hidden_act="gelu", projection_dim=32)
    vision, text = dict(image_size=32, patch_size=8), dict(vocab_size=64, eos_token_id=63)
    config = transformers.CLIPConfig(vision_config=sizes | vision, text_config=sizes | text)
    model = transformers.CLIPModel(config)
    model.set_grad_checkpointing = lambda on: model.gradient_checkpointing_enable()
    return model


def decoder(kind):
    """A language model of transformers, whose forward pass makes a cache of keys and values."""

    def make():
        transformers = pytest.importorskip("transformers")
        sizes = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, vocab_size=64)
        sizes |= dict(num_attention_heads=2, num_key_value_heads=2)
        config = getattr(transformers, f"{kind}Config")(**sizes)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        model.set_grad_checkpointing = lambda on: model.gradient_checkpointing_enable()
        return model

    return make


def transformers_vit():
    transformers = pytest.importorskip("transformers", "5")
    sizes = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2)
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    )


def images():
    return pair()[:1]


def tokens():
    return pair()[1:]


def tokens_and_images():
    return pair()[::-1]


def features():
    return (torch.sin(torch.arange(4 * 5 * 64.0)).view(4, 5, 64),)


def mean_square(model, inputs):
    return model(*inputs).square().mean()


def clip_loss(model, inputs):
    return open_clip.loss.ClipLoss()(*model(*inputs))


def own_loss(model, inputs):
    return model(*inputs, return_loss=True).loss


def next_token_loss(model, inputs):
    return model(*inputs, labels=inputs[0]).loss


def transformers_mlp():
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPTextConfig(hidden_size=64, intermediate_size=256, hidden_act="gelu")
    return transformers.models.clip.modeling_clip.CLIPMLP(config)


@dataclass(frozen=True)
class Model:
    """A model, the ends of its layers that are found, and of those among them it never calls.

    `blocks`: how many blocks with an MLP training prepares; None: it is not trained here.
    `fuses`: whether these MLPs run as one function.
    """

    make: Callable[[], nn.Module]
    layers: str
    uncalled: str = ""
    blocks: int | None = None
    fuses: bool = True
    where: Sequence[str] = LINEAR_LAYERS
    inputs: Callable[[], tuple] = images
    loss: Callable[[nn.Module, tuple], torch.Tensor] = mean_square

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.make()
        for name, p in model.named_parameters():
            if name.endswith(("gamma", "norm1.weight", "norm2.weight")) and p.max() < 1e-3:
                nn.init.ones_(p)  # else the residual branch adds nothing
        return model

    def output(self, model: nn.Module) -> torch.Tensor:
        """All features in one tensor."""
        output = model(*self.inputs())
        if hasattr(output, "image_embeds"):
            output = (output.image_embeds, output.text_embeds)
        output = getattr(output, "logits", output)
        parts = output if isinstance(output, tuple) else (output,)
        return torch.cat([x.flatten() for x in parts])

    def gradients(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The loss and the gradients of all parameters, by name."""
        model.zero_grad()
        device = next(model.parameters()).device
        loss = self.loss(model, tuple(x.to(device) for x in self.inputs()))
        loss.backward()
        named = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach()} | named


OF_DECODER = {"inputs": tokens, "loss": next_token_loss, "blocks": 2, "fuses": False}
DECODER_LAYERS = "q_proj k_proj v_proj o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"
VIT_LAYERS = "attn.qkv attn.proj mlp.fc1 mlp.fc2"
CLIP_LAYERS = "in_proj out_proj c_fc c_proj"
OF_CLIP = {"inputs": pair, "loss": clip_loss}
MODELS = {
    "open_clip": Model(clip, CLIP_LAYERS, blocks=4, **OF_CLIP),
    "open_clip, timm trunk": Model(
        clip_with_trunk, f"{CLIP_LAYERS} {VIT_LAYERS}", blocks=4, **OF_CLIP
    ),
    "open_clip, custom block": Model(lambda: block(custom=True), CLIP_LAYERS, inputs=features),
    "timm vit": Model(lambda: timm.models.VisionTransformer(**VIT), VIT_LAYERS, blocks=2),
    "timm siglip": Model(
        by_name("vit_base_patch16_siglip_224"),
        f"{VIT_LAYERS} attn_pool.q attn_pool.kv attn_pool.proj",
    ),
    "timm eva02": Model(
        by_name("eva02_large_patch14_224"),
        "attn.q_proj attn.k_proj attn.v_proj attn.proj mlp.fc1_g mlp.fc1_x mlp.fc2",
    ),
    "timm xcit": Model(
        lambda: timm.models.xcit.Xcit(img_size=32, embed_dim=64, depth=1, num_heads=2),
        f"{VIT_LAYERS} attn.q attn.k attn.v",
    ),
    "timm convnext": Model(
        lambda: timm.create_model("convnext_tiny", depths=(1,) * 4, dims=(8,) * 4),
        "mlp.fc1 mlp.fc2",
    ),
    "timm beit": Model(by_name("beit_base_patch16_224"), VIT_LAYERS, "attn.qkv"),
    "transformers clip": Model(
        transformers_clip, "q_proj k_proj v_proj out_proj mlp.fc1 mlp.fc2",
        blocks=4, inputs=tokens_and_images, loss=own_loss,
    ),
    **{
        f"transformers {kind}": Model(decoder(kind), DECODER_LAYERS, **OF_DECODER)
        for kind in ("Llama", "Qwen2")
    },
    "transformers vit": Model(transformers_vit, "q_proj k_proj v_proj o_proj mlp.fc1 mlp.fc2"),
    "torch": Model(
        lambda: nn.Sequential(mlp_of(), mlp_of()), "0 2", blocks=2, where=["*"], inputs=features
    ),
}  # fmt: skip
