"""Imports of models from other packages as runs, and exports of runs for other engines."""
