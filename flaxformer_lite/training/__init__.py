"""Losses, the pure training step, checkpoints and the training loop."""
