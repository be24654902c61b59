"""The Transformer: masks, positions, attention, layers and the assembled models; needs nothing but JAX and Flax."""
