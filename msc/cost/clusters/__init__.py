"""Clusters that are shipped, one JSON file each; `msc.Cluster.load("a100")` reads one by name."""

from __future__ import annotations

from pathlib import Path


def presets() -> dict[str, Path]:
    """The shipped cluster files by name, sorted."""
    return {file.stem: file for file in sorted(Path(__file__).parent.glob("*.json"))}
