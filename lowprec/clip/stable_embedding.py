"""A token embedding for 8-bit optimizers: Xavier weights and a layer norm of every token's row.

The norm adds `token_embedding.norm.weight` and `.bias`, which open_clip does not have. A row is
normed by itself, so `fold` gives the plain embedding that is the same function.
Source: the stable embedding layer, section 2.3, arXiv:2110.02861.
"""

from torch import Tensor, nn
from torch.nn import functional as F

NORM = ".token_embedding.norm."


class StableEmbedding(nn.Embedding):
    """`layer_norm(weight[tokens])`; weight is Xavier-uniform at first."""

    def __init__(self, num_tokens: int, width: int):
        super().__init__(num_tokens, width)
        self.norm = nn.LayerNorm(width)

    def reset_parameters(self) -> None:
        """Draws the weights; torch calls it."""
        nn.init.xavier_uniform_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """int64 [...] -> [..., width]."""
        return self.norm(super().forward(input))


def use_stable_embedding(model: nn.Module) -> None:
    """Gives a model a new token embedding, in place.

    ValueError if the text tower is not open_clip's own.
    """
    tower = getattr(model, "text", model)
    embedding = getattr(tower, "token_embedding", None)
    if not isinstance(embedding, nn.Embedding):
        raise ValueError("the text tower is not open_clip's own and has no token_embedding")
    tower.token_embedding = StableEmbedding(embedding.num_embeddings, embedding.embedding_dim)


def fold(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights with the embedding's norm worked into its rows: open_clip's names, the same model."""
    norms = {name: tensor for name, tensor in state.items() if NORM in f".{name}"}
    folded = {name: tensor for name, tensor in state.items() if name not in norms}
    for name, gain in norms.items():
        owner = name.removesuffix(".norm.weight")
        if owner != name:
            rows = folded[f"{owner}.weight"]
            bias = norms[f"{owner}.norm.bias"]
            normed = F.layer_norm(rows.float(), gain.shape, gain.float(), bias.float())
            folded[f"{owner}.weight"] = normed.to(rows.dtype)
    return folded
