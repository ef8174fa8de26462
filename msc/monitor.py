"""`msc beat` on every node of a run, and `msc monitor` on any machine that they reach.

Beats are datagrams, so that nobody waits for the monitor; it may be stopped and started at will.
"""

from __future__ import annotations

import gc
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Annotated

import typer

from msc.command_exit import guarded
from msc.ir.errors import UserError
from msc.runtime.monitor.beat import MAX_BYTES, Beat
from msc.runtime.monitor.sources import LogTail, port_counters, rank_beat
from msc.runtime.monitor.watch import PERIOD_S, Event, Watch

_NAP = 0.03  # of a period
_FORCE = 33  # SO_RCVBUFFORCE of Linux, which Python has no name for
_BUFFER_BYTES = 32 << 20  # for the beats of a thousand nodes that come at once


def address(text: str) -> tuple[str, int]:
    """HOST:PORT; `UserError` for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not int(port) < 65536:
        raise UserError(f"'{text}' is no address; write host:port, such as 10.0.0.1:29400.")
    return host, int(port)


def resolved(target: tuple[str, int]) -> tuple[str, int]:
    """The same with the host's IPv4 address, looked up once; `UserError` if it has none."""
    try:
        found = socket.getaddrinfo(*target, socket.AF_INET, socket.SOCK_DGRAM)
    except OSError as error:
        raise UserError(f"The host of {target[0]}:{target[1]} is not found: {error}") from error
    host, port = found[0][4][:2]
    return str(host), int(port)


def check_sources(run: Path, logs: Sequence[Path]) -> None:
    """`UserError` if the run's folder is none, or a log cannot be read; it need not exist yet."""
    if not run.is_dir():
        raise UserError(
            f"{run} is no folder. Give the one that Trainer(run=..) has; it may be empty so far."
        )
    for log in logs:
        try:
            log.open("rb").close()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UserError(f"The log {log} cannot be read: {error}") from error


def beat_of(run: Path, tail: LogTail, node: str) -> Beat:
    """What this node tells now: of the ranks whose processes are or were on it."""
    ranks = []
    for ring in sorted(run.glob("rank-*.ring")):
        try:
            beat = rank_beat(ring)
        except (OSError, ValueError):
            continue  # it is being made
        if beat.state != "unknown":  # that is of another machine
            ranks.append(beat)
    return Beat(node, time.time(), tuple(ranks), port_counters(), tuple(tail.lines()))


def beats(
    run: Path, target: tuple[str, int], tail: LogTail, node: str, period_s: float
) -> Iterator[Beat]:
    """Send a beat each period, for as long as it is asked for the next."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        due = time.monotonic()
        while True:
            beat = beat_of(run, tail, node)
            try:
                out.sendto(beat.to_bytes(), target)
            except OSError:
                pass  # nobody may be there: a monitor that starts later hears the next one
            yield beat
            due = max(due + period_s, time.monotonic())
            time.sleep(max(due - time.monotonic(), 0.0))


def open_inbox(listen: tuple[str, int]) -> socket.socket:
    """The socket of a monitor. Raises `UserError` if the address is not to be had."""
    inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        try:  # more than the machine's limit, which root alone may have
            inbox.setsockopt(socket.SOL_SOCKET, _FORCE, _BUFFER_BYTES)
        except PermissionError:
            inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        inbox.bind(listen)
    except OSError as error:
        inbox.close()
        raise UserError(f"{listen[0]}:{listen[1]} cannot be listened to: {error}") from error
    return inbox


def open_events(file: Path) -> IO[str]:
    """Where events are appended. Raises `UserError` if that is not possible."""
    try:
        return file.open("a")
    except OSError as error:
        raise UserError(f"Events cannot be appended to {file}: {error}") from error


def watch(inbox: socket.socket, period_s: float, until: Callable[[], bool]) -> Iterator[Event]:
    """Events as they come; looks at `until` some times in each period.

    Beats that have come are heard before anybody is called late.
    """
    state = Watch(period_s)
    look = time.monotonic() + period_s
    room = bytearray(MAX_BYTES)
    while not until():
        for data in _arrived(inbox, room):
            try:
                beat = Beat.from_bytes(data)
            except ValueError:
                continue  # somebody else's datagram
            yield from state.hear(beat, time.time())
        if time.monotonic() >= look:
            look = time.monotonic() + period_s
            yield from state.late(time.time())
        time.sleep(_NAP * period_s)  # many at once cost less than each by itself


def _arrived(inbox: socket.socket, room: bytearray) -> Iterator[bytes]:
    """The datagrams that are there."""
    while True:
        try:
            size = inbox.recv_into(room, 0, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        yield bytes(memoryview(room)[:size])


Run = Annotated[Path, typer.Argument(help="The folder that Trainer(run=..) was given.")]
To = Annotated[str, typer.Option("--to", metavar="HOST:PORT", help="Where msc monitor listens.")]
Logs = Annotated[
    list[Path] | None, typer.Option("--log", help="A log to search for known errors, as it grows.")
]
Listen = Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where beats arrive.")]
Events = Annotated[
    Path | None, typer.Option("--events", help="Also append events to this file, as JSON lines.")
]
Period = Annotated[float, typer.Option("--period", min=0.05, help="Seconds between beats.")]


def beat(run: Run, to: To, log: Logs = None, period: Period = PERIOD_S) -> None:
    """Tell msc monitor what this node's ranks of a run do, until it is stopped."""

    def action() -> Callable[[], int]:
        target = resolved(address(to))
        check_sources(run, log or [])
        for _ in beats(run, target, LogTail(log or []), socket.gethostname(), period):
            pass
        return lambda: 0

    raise typer.Exit(guarded(action, as_json=False))


def monitor(listen: Listen, events: Events = None, period: Period = PERIOD_S) -> None:
    """Watch the nodes that send beats, and print what goes wrong, with rank and node."""

    def action() -> Callable[[], int]:
        out = None if events is None else open_events(events)
        inbox = open_inbox(address(listen))
        gc.disable()  # what is kept of thousands of ranks has no cycles, and looking for some costs

        def show() -> int:
            for event in watch(inbox, period, until=lambda: False):
                print(event, flush=True)
                if out is not None:
                    print(json.dumps(asdict(event)), file=out, flush=True)
            return 0

        return show

    raise typer.Exit(guarded(action, as_json=False))
