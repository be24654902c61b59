"""Batches of token ids: which examples share a batch or a row, and the stream of batches."""
