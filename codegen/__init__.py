"""Graphs to runnable code."""
