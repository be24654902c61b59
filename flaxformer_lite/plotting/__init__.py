"""Figures of runs, and the arrays that they show."""
