"""Turning a trained model into sequences of tokens."""
