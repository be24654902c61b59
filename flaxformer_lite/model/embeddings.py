"""Token ids to vectors before a stack of layers, and vectors to logits after it. Section 3.4."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.fields import ModelConfig
from flaxformer_lite.model.dense import add_bias, matmul
from flaxformer_lite.model.devices import keep_rows_split, keep_vectors_whole
from flaxformer_lite.model.dropout import Dropout
from flaxformer_lite.model.masks import TokenPositions
from flaxformer_lite.model.positions import PositionVectors


def token_embedding(config: ModelConfig, *, side: str = "target") -> nn.Embed:
    """Returns the module of the (V, D) table, of unit variance after the scaling of section 3.4.

    Its vectors are float32 for every `dtype`, and so are the sums of a frequent token's gradients.
    In bfloat16 a sum of more than a few hundred equal terms stops growing.

    `side`: 'source' or 'target', whose vocabularies may have different sizes.
    """
    vocab_size = config.vocab_size if side == "source" else config.output_vocab_size
    assert vocab_size is not None, "build_model requires it"
    init = nn.initializers.normal(config.d_model**-0.5)
    return nn.Embed(vocab_size, config.d_model, embedding_init=init)


class Inputs(nn.Module):
    """Embeddings times sqrt(d_model), plus positions, then dropout. Sections 3.4, 3.5 and 5.4."""

    config: ModelConfig
    embedding: nn.Embed

    def setup(self) -> None:
        c = self.config
        self.position_vectors = PositionVectors(c)
        self.drop = Dropout(c.dropout if c.embedding_dropout is None else c.embedding_dropout)

    def __call__(
        self, ids_BL: jax.Array, positions: TokenPositions, **dropout_args: Any
    ) -> jax.Array:
        """Returns the input of the first layer, (B, L, D)."""
        dtype = self.config.dtype
        table_VD = keep_vectors_whole(self.embedding.embedding)
        scale = jnp.sqrt(self.config.d_model).astype(dtype)
        x_BLD = jnp.take(table_VD, ids_BL, axis=0).astype(dtype) * scale
        vectors_BLD = self.position_vectors(positions.position_BL)
        if vectors_BLD is not None:
            x_BLD = add_bias(x_BLD, vectors_BLD)
        return keep_rows_split(self.drop(x_BLD, **dropout_args))


class Output(nn.Module):
    """The weights of the final projection; tied embeddings share their matrix. Section 3.4."""

    config: ModelConfig
    embedding: nn.Embed

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        """Returns the weights for `project`: `matrix` (V, D), and `bias` (V,) if configured."""
        c = self.config
        if c.tie_embeddings:
            weights = {"matrix": self.embedding.embedding}
        else:
            init = nn.initializers.xavier_uniform()
            weights = {"matrix": self.param("kernel", init, (c.output_vocab_size, c.d_model))}
        if c.output_bias:
            weights["bias"] = self.param("bias", nn.initializers.zeros, (c.output_vocab_size,))
        return weights


def project(x_BTD: jax.Array, weights: dict[str, jax.Array], config: ModelConfig) -> jax.Array:
    """Returns logits (B, T, V), float32, from the weights of `Output`. Section 3.4."""
    logits_BTV = matmul(x_BTD.astype(config.dtype), weights["matrix"], 1, True, jnp.float32)
    return logits_BTV + weights["bias"][None, None] if "bias" in weights else logits_BTV
