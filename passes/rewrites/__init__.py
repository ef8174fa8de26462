"""Rewrites that change a model's mathematics: one file for each."""
