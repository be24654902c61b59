"""Decoding: from a trained model to sequences of tokens."""
