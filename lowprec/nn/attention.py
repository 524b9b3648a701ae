"""Self-attention for open_clip's blocks, with low-precision projections and no layout copies."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowprec import ops
from lowprec.nn.linear import KeepsRecipe, Settings, linear, refuse_second_derivative


class Attention(KeepsRecipe, nn.MultiheadAttention):
    """Multi-head self-attention; `replace` converts a module to it.

    Called like nn.MultiheadAttention (`module(q, k, v, ...) -> (output, None)`), or like the
    attention of open_clip's custom blocks if it replaces that (`module(x, ...) -> output`).
    Queries, keys and values are views of one product and are never copied.

    Attributes:
        causal: whether the kernel masks causally, instead of adding the causal mask it is passed.
        in_proj_settings: how queries, keys and values are projected; None for F.linear.
    """

    returns_pair = True
    causal = False
    in_proj_settings: Settings | None = None

    def recipe_name(self) -> str:
        """The name of the input projection's recipe."""
        return self.in_proj_settings.recipe.name if self.in_proj_settings else "high"

    def in_proj(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] -> [batch, tokens, 3 width]: queries, keys, values."""
        if self.in_proj_settings is None:
            return F.linear(x, self.in_proj_weight, self.in_proj_bias)
        return linear(x, self.in_proj_weight, self.in_proj_bias, self.in_proj_settings)

    def forward(
        self,
        x: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        *,
        k_x: Tensor | None = None,
        v_x: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, None]:
        """[batch, tokens, width] -> the same shape; (output, None) for nn.MultiheadAttention.

        open_clip 4 calls keys and values `k_x` and `v_x`. Raises ValueError for `need_weights`, and
        if keys or values are not the same tensor as the queries. Full backward hooks on this module
        make them different tensors.
        """
        if any(y is not None and y is not x for y in (key, value, k_x, v_x)):
            text = "keys and values must be the queries: this is self-attention"
            raise ValueError(f"{text}, and full backward hooks on it pass three tensors")
        if need_weights:
            raise ValueError("need_weights=True: the attention kernel does not keep its weights")
        qkv = self.in_proj(x)
        mask = None if self.causal else attn_mask
        has_norm = not isinstance(self.ln_q, nn.Identity)
        if mask is None and not has_norm and ops.takes_attention(qkv, self.num_heads, self.causal):
            heads = _ShortAttention.apply(qkv, self.num_heads, self.causal)
        else:
            heads = self._attend(qkv, mask)
        output = self.out_proj(heads)
        return (output, None) if self.returns_pair else output

    def _attend(self, qkv: Tensor, mask: Tensor | None) -> Tensor:
        """[batch, tokens, 3 width] -> [batch, tokens, width], by torch's kernel."""
        query, key, value = self._split(qkv)
        if mask is not None:
            mask = _additive(mask, len(qkv), self.num_heads).to(query.dtype)
        heads = F.scaled_dot_product_attention(
            query, key, value.to(query.dtype), attn_mask=mask, is_causal=self.causal
        )
        return heads.transpose(1, 2).flatten(2)

    def largest_logit(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """The largest `q k / sqrt(head width)` that is not masked: float32, 0-d.

        Needs memory for all logits, [batch, heads, tokens, tokens].
        """
        query, key, _ = self._split(self.in_proj(x))
        logits = (query @ key.transpose(2, 3)).float() / query.shape[-1] ** 0.5
        if attn_mask is not None:
            logits = logits + _additive(attn_mask, len(x), self.num_heads)
        return logits.max()

    def _split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, [batch, heads, tokens, head width] each."""
        parts = qkv.unflatten(2, (3, self.num_heads, -1)).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        return self.ln_q(query), self.ln_k(key), value


class _ShortAttention(torch.autograd.Function):
    """`ops.attention` as an autograd function; saves only its input for backward."""

    @staticmethod
    def forward(ctx, qkv, num_heads, is_causal):
        ctx.save_for_backward(qkv)
        ctx.options = num_heads, is_causal
        return ops.attention(qkv, num_heads, is_causal)

    @staticmethod
    def backward(ctx, g):
        refuse_second_derivative()
        return ops.attention_backward(g, *ctx.saved_tensors, *ctx.options), None, None


def _additive(mask: Tensor, batch: int, num_heads: int) -> Tensor:
    """Turns nn.MultiheadAttention's mask into one that is added to the logits: True to -inf."""
    if mask.ndim == 3:
        mask = mask.reshape(batch, num_heads, *mask.shape[1:])
    if not mask.is_floating_point():
        return mask.new_zeros(mask.shape, dtype=float).masked_fill(mask, float("-inf"))
    return mask


def replace(module: nn.Module) -> None:
    """Makes a module for which `is_replaceable` holds an `Attention`, in place.

    in_proj_weight [3 width, width], in_proj_bias, out_proj, ln_q, ln_k, hooks and mode stay.
    """
    module.returns_pair = isinstance(module, nn.MultiheadAttention)
    module.__class__ = Attention
    if module.returns_pair:
        module.ln_q = module.ln_k = nn.Identity().train(module.training)


def is_replaceable(module: nn.Module) -> bool:
    """Whether a module is plain self-attention that `Attention` computes exactly."""
    if module._parameters.get("in_proj_weight") is None or "forward" in vars(module):
        return False
    if isinstance(module, nn.MultiheadAttention):
        if type(module) is not nn.MultiheadAttention or not module.batch_first:
            return False
        return module.bias_k is None and not module.add_zero_attn and module.dropout == 0
    if not hasattr(module, "ln_inner"):
        return False  # only open_clip's attention has ln_inner
    return (
        module.logit_scale is None
        and module.head_scale is None
        and isinstance(module.ln_inner, nn.Identity)
        and module.attn_drop.p == module.out_drop.p == 0
    )
