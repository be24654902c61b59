"""Sweeps: many runs from one file, checked before they start, killed and resumed at will, compared in one table."""
