"""From token ids to the vectors that a stack of layers reads, and from those that it gives to logits. Section 3.4."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from flaxformer_lite.config import ModelConfig
from flaxformer_lite.model.dense import add, product
from flaxformer_lite.model.devices import keep_rows, whole_vectors
from flaxformer_lite.model.dropout import Dropout
from flaxformer_lite.model.masks import TokenPositions
from flaxformer_lite.model.positions import PositionVectors


def token_embedding(config: ModelConfig) -> nn.Embed:
    """(V, D) table; its standard deviation of d_model^-0.5 gives unit variance after the scaling of section 3.4.

    What is looked up is float32 whatever `dtype` is, and so are the sums of gradients of a frequent token: in bfloat16
    a sum of more than a few hundred like terms stands still.
    """
    init = nn.initializers.normal(config.d_model**-0.5)
    return nn.Embed(config.vocab_size, config.d_model, embedding_init=init)


class Inputs(nn.Module):
    """Token embeddings times sqrt(d_model), plus positions, then dropout; sections 3.4, 3.5 and 5.4."""

    config: ModelConfig
    embedding: nn.Embed

    def setup(self):
        self.position_vectors = PositionVectors(self.config)
        self.drop = Dropout(self.config.dropout)

    def __call__(self, ids_BL: jax.Array, positions: TokenPositions, **mode) -> jax.Array:
        """(B, L, D)."""
        dtype = self.config.dtype
        table_VD = whole_vectors(self.embedding.embedding)
        x_BLD = jnp.take(table_VD, ids_BL, axis=0).astype(dtype) * jnp.sqrt(self.config.d_model).astype(dtype)
        vectors_BLD = self.position_vectors(positions.position_BL)
        if vectors_BLD is not None:
            x_BLD = add(x_BLD, vectors_BLD)
        return keep_rows(self.drop(x_BLD, **mode))


class Output(nn.Module):
    """The weights of the final projection; with tied embeddings its matrix is theirs. Section 3.4."""

    config: ModelConfig
    embedding: nn.Embed

    @nn.compact
    def __call__(self) -> dict[str, jax.Array]:
        """`matrix` (V, D), and where the config has one `bias` (V,): what `project` needs."""
        c = self.config
        if c.tie_embeddings:
            weights = {"matrix": self.embedding.embedding}
        else:
            weights = {"matrix": self.param("kernel", nn.initializers.xavier_uniform(), (c.vocab_size, c.d_model))}
        if c.output_bias:
            weights["bias"] = self.param("bias", nn.initializers.zeros, (c.vocab_size,))
        return weights


def project(x_BTD: jax.Array, weights: dict[str, jax.Array], config: ModelConfig) -> jax.Array:
    """Logits (B, T, V), float32, by the weights of `Output`. Section 3.4."""
    logits_BTV = product(x_BTD.astype(config.dtype), weights["matrix"], 1, True, jnp.float32)
    return logits_BTV + weights["bias"][None, None] if "bias" in weights else logits_BTV
