"""What a run's agent tells: lines for the user, and the same as JSON in the run's folder."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

FILE = "events.jsonl"


class Events:
    """Appends to FOLDER/events.jsonl; each line has the time in seconds since 1970."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE
        self._file.touch()

    def record(self, event: str, **facts: Any) -> None:
        """Record an event."""
        line = json.dumps({"time": time.time(), "event": event, **facts})
        with self._file.open("a") as file:
            file.write(line + "\n")

    def say(self, text: str) -> None:
        """Tell the user, on stderr."""
        print(f"msc: {text}", file=sys.stderr, flush=True)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run so far."""
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
