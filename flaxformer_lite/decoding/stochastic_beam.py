"""Stochastic beam search: samples of whole texts without replacement. Kool 2019.

Each text has a perturbed log-probability: phi, its log-probability, plus Gumbel noise. The n texts
with the highest ones are n different samples, and the first is an ordinary sample. Beam search
finds them: the perturbed log-probability of a hypothesis is the maximum over its texts. So that of
its best continuation equals its own (section 4.1), and a worse hypothesis has no better text.
"""

import jax
import jax.numpy as jnp

from flaxformer_lite.decoding import beam


def chooser(seed: int, row_B: jax.Array) -> beam.ChooseFn:
    """Returns the function that chooses the continuations with the highest perturbed values.

    The noise of row b is a function of (seed, index of the token, row_B[b]).
    """
    key = jax.random.key(seed)

    def choose(
        state: beam.Beams, log_prob_BWV: jax.Array, search: beam.Search
    ) -> beam.Continuations:
        # Constraints leave less than a probability of 1; the sum over continuations must be 1.
        log_prob_BWV = jnp.where(
            log_prob_BWV > beam.NONE, jax.nn.log_softmax(log_prob_BWV), beam.NONE
        )
        phi_BWV = state.phi_BW[..., None] + log_prob_BWV
        key_B = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, state.index), row_B)
        noise_BWV = jax.vmap(lambda key: jax.random.gumbel(key, phi_BWV.shape[1:]))(key_B)
        value_BWV = phi_BWV + noise_BWV
        value_BWV = jnp.where(
            state.index == 0,  # the empty text has no value yet: its continuations are free
            value_BWV,
            with_maximum(value_BWV, state.log_prob_BW[..., None]),
        )
        found = beam.highest(value_BWV, search)
        row_B1 = jnp.arange(len(row_B))[:, None]
        return found._replace(phi_BW=phi_BWV[row_B1, found.parent_BW, found.token_BW])

    return choose


def with_maximum(value_BWV: jax.Array, maximum_BW1: jax.Array) -> jax.Array:
    """Returns perturbed values given that their maximum over V is `maximum_BW1`. Appendix B.3.

    It maps each of them so that their distribution is that of Gumbel noise under this condition.
    """
    exists_BWV = value_BWV > beam.NONE
    largest_BW1 = value_BWV.max(axis=-1, keepdims=True)
    difference_BWV = jnp.where(exists_BWV, largest_BW1 - value_BWV, jnp.inf)
    v_BWV = maximum_BW1 - value_BWV + jax.nn.log1mexp(difference_BWV)
    return jnp.where(exists_BWV, maximum_BW1 - jax.nn.softplus(v_BWV), beam.NONE)
