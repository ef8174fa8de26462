"""The monitor: nodes send beats, one process that holds no rank watches them and raises events."""
