"""The commands and their flags."""
