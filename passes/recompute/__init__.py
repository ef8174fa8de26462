"""Activation recomputation: what the backward computes again and does not find saved."""
