"""Silent corruption: copies that differ, losses that leap, and steps that are repeated to tell."""
