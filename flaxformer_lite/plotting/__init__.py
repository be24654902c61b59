"""Figures, and the arrays of a run that they show."""
