"""Executors of rank graphs."""
