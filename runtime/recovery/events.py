"""What a run's agent tells: lines for the user, and the same as JSON in the run's folder."""

from __future__ import annotations

import errno
import json
import os
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
        self._failed = False

    def record(self, event: str, **facts: Any) -> None:
        """Record an event; a run is not ended by a disk that takes none."""
        line = json.dumps({"time": time.time(), "event": event, **facts}) + "\n"
        try:
            with self._file.open("ab", buffering=0) as file:
                start, data = file.tell(), line.encode()
                if file.write(data) < len(data):
                    file.truncate(start)  # half a line is none
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))
        except OSError as error:
            if not self._failed:
                self.say(f"events are lost from here on: {error}")
            self._failed = True

    def say(self, text: str) -> None:
        """Tell the user, on stderr."""
        print(f"msc: {text}", file=sys.stderr, flush=True)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of a run so far."""
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
