"""The Transformer of "Attention Is All You Need" as pure functions in JAX and Flax.

The names of arrays end in a letter for each axis, and einsum uses the same letters:

    B  batch                    D  model width (d_model)       N  layers, or examples
    T  target or query length   F  feed-forward width (d_ff)   V  vocabulary
    S  source or key length     H  attention heads             L  any length
    K  size of one head (d_k)   M  microbatches

For example, `x_BTD` has the shape (batch, target length, d_model), and `'BTHK,BSHK->BHTS'` is
the product of each query with each key.
"""

__version__ = "0.2.0"
