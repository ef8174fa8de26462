"""Bringing a run back: the agent that starts its ranks, and the ranks' side of it."""
