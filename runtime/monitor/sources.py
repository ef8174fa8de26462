"""Where a node's beat comes from: rings of its ranks, counters of its ports, lines of its logs."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from msc.runtime.diagnosis.ring import read_ring
from msc.runtime.monitor.beat import RankBeat

PATTERNS = re.compile(
    r"CUDA error|\bXid\b|NCCL (?:WARN|error)|uncorrectable|\bECC\b|out of memory|oom-kill"
    r"|Segmentation fault|Traceback \(most recent|Connection reset by peer|Input/output error"
    r"|No space left on device|Read-only file system|CommunicationError",
    re.IGNORECASE,
)
"""Known errors, in the words of torch, the driver, the kernel and MSC."""

_LINES, _LENGTH = 5, 200  # of a beat


def rank_beat(ring: Path) -> RankBeat:
    """One rank as its ring says now; `ValueError` and `OSError` as `read_ring` has them."""
    view = read_ring(ring, last=1)
    started: dict[str, int] = {}
    for channel, count in view.started.items():
        axis = channel.partition(":")[0]
        started[axis] = started.get(axis, 0) + count
    wait = view.open_wait
    record = view.records[-1] if view.records else None
    return RankBeat(
        view.rank,
        view.alive,
        view.phase,
        view.step,
        0.0 if wait is None else max(time.time() - wait.enter_ns / 1e9, 0.0),
        "" if record is None else f"{record.kind} {record.channel}",
        started,
    )


def port_counters(sys_class: Path = Path("/sys/class")) -> dict[str, tuple[int, int, int]]:
    """Bytes received and sent, and errors, of network interfaces and InfiniBand ports.

    InfiniBand counts words of four bytes, whatever the names of its files say.
    """
    found = {}
    for folder in sorted((sys_class / "net").glob("*/statistics")):
        numbers = [_number(folder / name) for name in ("rx_bytes", "tx_bytes")]
        errors = _number(folder / "rx_errors") + _number(folder / "tx_errors")
        found[folder.parent.name] = (numbers[0], numbers[1], errors)
    for folder in sorted((sys_class / "infiniband").glob("*/ports/*/counters")):
        name = f"{folder.parts[-4]}:{folder.parts[-2]}"
        words = [_number(folder / f"port_{way}_data") for way in ("rcv", "xmit")]
        errors = sum(
            _number(folder / name)
            for name in ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_discards")
        )
        found[name] = (4 * words[0], 4 * words[1], errors)
    return found


def _number(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


class LogTail:
    """New lines of log files that match a known error; what is there before is not new."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._places = {file: _size(file) for file in files}

    def lines(self) -> list[str]:
        """The last few since the call before, cut to a length that a beat has room for."""
        found = []
        for file, place in self._places.items():
            size = _size(file)
            if size < place:  # it was begun anew
                place = 0
            if size > place:
                data = _part(file, place, size)
                whole = data.rpartition(b"\n")[0]  # the rest of a line comes later
                place += len(whole) + (b"\n" in data)
                text = whole.decode(errors="replace")
                found += [line for line in text.splitlines() if PATTERNS.search(line)]
            self._places[file] = place
        return [line.strip()[:_LENGTH] for line in found[-_LINES:]]


def _part(file: Path, start: int, end: int) -> bytes:
    try:
        with file.open("rb") as handle:
            handle.seek(start)
            return handle.read(end - start)
    except OSError:  # it was removed just now, or may not be read: the next beat tries again
        return b""


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
