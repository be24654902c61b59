"""Losses, the pure training step, checkpoints and the one loop that uses them."""
