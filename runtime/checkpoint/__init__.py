"""Checkpoints: copied beside the step, written by a process of their own, read by any layout.

Modules that the writing process imports (`writer`, `committing`, `storage`, `catalog`, `manifest`)
import no torch, so that it starts at once and stays small.
"""
