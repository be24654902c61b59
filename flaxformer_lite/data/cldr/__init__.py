"""Phrases of the Unicode CLDR, for the datasets that the package makes."""
