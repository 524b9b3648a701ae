"""Self-attention for open_clip's blocks, with low-precision projections and no layout copies."""

import torch.nn.functional as F
from torch import Tensor, nn

from lowprec.nn.linear import linear
from lowprec.nn.recipe import Recipe


class Attention(nn.Module):
    """Multi-head self-attention that takes the parameters of the module it replaces.

    Stands for nn.MultiheadAttention (`replaced(q, k, v, ...) -> (output, None)`) and for the
    attention of open_clip's custom blocks (`replaced(x, ...) -> output`), parameter names kept:
    in_proj_weight [3 width, width], in_proj_bias, out_proj, ln_q and ln_k where there are some.
    Its hooks stay too.
    Queries, keys and values are views of one product, never copied; with `causal` the mask that a
    caller hands over must be the causal one, and is left to the attention kernel.
    """

    def __init__(self, replaced: nn.Module):
        super().__init__()
        self.num_heads = replaced.num_heads
        self.returns_pair = isinstance(replaced, nn.MultiheadAttention)
        self.causal = False
        self.in_proj_weight = replaced.in_proj_weight
        self.in_proj_bias = replaced.in_proj_bias
        self.ln_q = getattr(replaced, "ln_q", nn.Identity())
        self.ln_k = getattr(replaced, "ln_k", nn.Identity())
        self.out_proj = replaced.out_proj
        self.in_proj_settings: dict | None = None
        carry_hooks(replaced, self)

    def set_in_proj_recipe(self, recipe: Recipe, backend: str, outlier_threshold: float) -> None:
        """Makes the fused projection of queries, keys and values one low-precision product."""
        self.in_proj_settings = {
            "recipe": recipe,
            "backend": backend,
            "outlier_threshold": outlier_threshold,
        }

    def in_proj(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> [batch, tokens, 3 width]: queries, keys, values."""
        if self.in_proj_settings is None:
            return F.linear(x, self.in_proj_weight, self.in_proj_bias)
        return linear(x, self.in_proj_weight, self.in_proj_bias, **self.in_proj_settings)

    def forward(
        self,
        x: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, None]:
        """[batch, tokens, width] -> the same; a pair with None where nn.MultiheadAttention was.

        ValueError for other keys or values than the queries', which full backward hooks on this
        module make of them too, or for `need_weights`.
        """
        if (key is not None and key is not x) or (value is not None and value is not x):
            raise ValueError("keys and values must be the queries: this is self-attention")
        if need_weights:
            raise ValueError("need_weights=True: the attention kernel does not keep its weights")
        batch, tokens, width = x.shape
        query, key, value = self._project(x)
        mask = None
        if attn_mask is not None and not self.causal:
            mask = _additive(attn_mask, batch, self.num_heads).to(query.dtype)
        heads = F.scaled_dot_product_attention(
            query, key, value.to(query.dtype), attn_mask=mask, is_causal=self.causal
        )
        output = self.out_proj(heads.transpose(1, 2).reshape(batch, tokens, width))
        return (output, None) if self.returns_pair else output

    def largest_logit(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """The largest `q k / sqrt(head width)` that the mask lets through: float32, 0-d.

        Computes all of them, [batch, heads, tokens, tokens].
        """
        query, key, _ = self._project(x)
        logits = (query @ key.transpose(2, 3)).float() / query.shape[-1] ** 0.5
        if attn_mask is not None:
            logits = logits + _additive(attn_mask, len(x), self.num_heads)
        return logits.max()

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, [batch, heads, tokens, head width] each."""
        batch, tokens, width = x.shape
        qkv = self.in_proj(x).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(2))
        return self.ln_q(query), self.ln_k(key), value


def _additive(mask: Tensor, batch: int, num_heads: int) -> Tensor:
    """A mask as nn.MultiheadAttention takes it, as one that is added: True becomes -inf."""
    if mask.ndim == 3:
        mask = mask.reshape(batch, num_heads, *mask.shape[1:])
    if not mask.is_floating_point():
        return mask.new_zeros(mask.shape, dtype=float).masked_fill(mask, float("-inf"))
    return mask


def is_replaceable(module: nn.Module) -> bool:
    """Whether a module is self-attention that `Attention` computes exactly.

    Not a subclass of nn.MultiheadAttention, a patched forward or a parametrized weight.
    """
    if module._parameters.get("in_proj_weight") is None or "forward" in vars(module):
        return False
    if isinstance(module, nn.MultiheadAttention):
        plain = module.bias_k is None and not module.add_zero_attn and module.dropout == 0
        return plain and module.batch_first and type(module) is nn.MultiheadAttention
    if not hasattr(module, "ln_inner"):
        return False  # not open_clip's own
    return (
        module.logit_scale is None
        and module.head_scale is None
        and isinstance(module.ln_inner, nn.Identity)
        and module.attn_drop.p == module.out_drop.p == 0
    )


def carry_hooks(old: nn.Module, new: nn.Module) -> None:
    """Gives a module that stands for another its hooks of every kind; their handles still work."""
    vars(new).update((name, value) for name, value in vars(old).items() if "_hook" in name)
