"""Sweeps: many runs from one file, checked before training, resumable, compared in one table."""
