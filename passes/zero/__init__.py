"""Sharding of optimizer state, gradients and parameters over dp (ZeRO)."""
