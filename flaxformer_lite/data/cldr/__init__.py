"""Phrases rendered from the Unicode CLDR, for the datasets that the package generates."""
