"""Position schemes. The paper's two are added to the embeddings: sinusoidal and learned (section 3.5)."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def sinusoidal(position_L: jax.Array, d_model: int) -> jax.Array:
    """Sines and cosines of each position: (L, d_model) float32, for any length. Section 3.5.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)) and PE(pos, 2i + 1) is the cosine of the same angle.

    Raises:
      ValueError: `d_model` is odd, so that a sine has no cosine beside it.
    """
    if d_model % 2:
        raise ValueError(f"sinusoidal positions need an even d_model, got {d_model}.")
    frequency = (10000.0 ** (-np.arange(0, d_model, 2) / d_model)).astype(np.float32)
    angle = position_L.astype(jnp.float32)[:, None] * frequency[None, :]
    return jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(-1, d_model)


class LearnedPositions(nn.Module):
    """A table with one learned vector a position; Table 3, row (E). It ends at `max_length`."""

    max_length: int
    d_model: int

    @nn.compact
    def __call__(self, position_L: jax.Array) -> jax.Array:
        """(L, d_model) float32 for integer positions below `max_length`.

        Raises:
          ValueError: more positions than the table has rows.
        """
        if position_L.shape[0] > self.max_length:
            raise ValueError(
                f"learned positions end at max_length = {self.max_length}, got {position_L.shape[0]} positions; "
                "shorten the input, or use position='sinusoidal'."
            )
        shape = (self.max_length, self.d_model)
        table = self.param("embedding", nn.initializers.normal(self.d_model**-0.5), shape)
        return table[position_L]
