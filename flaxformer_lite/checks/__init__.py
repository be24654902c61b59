"""Checks of fields against each other, and the sizes and sides of a vocabulary by its fields."""
