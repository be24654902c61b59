"""The Transformer: masks, positions, attention, layers and models, on JAX and Flax alone."""
