"""flaxformer_lite: the Transformer of "Attention Is All You Need" as pure functions in JAX and Flax.

The dimension key. Arrays carry their axes as a suffix, and einsum uses the same letters:

    B  batch                    D  model width (d_model)       N  layers, or examples
    T  target or query length   F  feed-forward width (d_ff)   V  vocabulary
    S  source or key length     H  attention heads             L  any length
    K  size of one head (d_k)   M  microbatches

So `x_BTD` is (batch, target length, d_model), and `'BTHK,BSHK->BHTS'` compares each query with each key.
"""

__version__ = "0.1.0"
