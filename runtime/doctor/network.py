"""Checks of a machine's network: interfaces, the loopback, and how long look-ups of names take."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msc.runtime.checkpoint.manifest import digest
from msc.runtime.doctor.check import MEASURED, Check, Value, failed, measured, passed
from msc.runtime.recovery.addresses import is_loopback

LOOKUP_S = 1.0
"""Known to be bad: a lost answer costs the resolver 5 s, and a TCPStore client looks up 4 names."""

Receive = Callable[[socket.socket, memoryview], int]


def check_loopback(size: int, receive: Receive = socket.socket.recv_into) -> Check:
    """Send `size` bytes to ourselves over TCP, and look at what arrives."""
    block = os.urandom(1 << 20)
    size = size // len(block) * len(block)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = threading.Thread(target=_send, args=(server.getsockname()[1], block, size))
        sender.start()
        connection, _ = server.accept()
        arrived = bytearray(size)
        view = memoryview(arrived)
        with connection:
            connection.settimeout(10)
            done, started = 0, time.perf_counter()
            while done < size and (count := receive(connection, view[done:])):
                done += count
            seconds = time.perf_counter() - started
        sender.join()
    if done < size:
        return failed("loopback", f"the connection ended after {done} of {size} bytes")
    wanted = digest(block)
    for start in range(0, size, len(block)):
        if digest(view[start : start + len(block)]) != wanted:
            return failed("loopback", f"bytes {start} to {start + len(block)} arrived changed")
    return measured("loopback", bandwidth=Value(size / seconds / 1e9, "GB/s", floor=0.05))


def _send(port: int, block: bytes, size: int) -> None:
    # who receives tells what goes wrong
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as out:
        for _ in range(size // len(block)):
            out.sendall(block)


def check_interfaces(sys_class: Path = Path("/sys/class")) -> Check:
    """Which network interfaces and InfiniBand ports are up; all others are named."""
    up: list[str] = []
    down: list[str] = []
    for folder in sorted((sys_class / "net").glob("*")):
        if folder.name != "lo":
            is_up = _read(folder / "operstate") in ("up", "unknown")  # virtual ones do not know
            (up if is_up else down).append(folder.name)
    for folder in sorted((sys_class / "infiniband").glob("*/ports/*")):
        name = f"{folder.parts[-3]}:{folder.name}"
        (up if "ACTIVE" in _read(folder / "state") else down).append(name)
    detail = f"up: {', '.join(up) or 'none'}" + (f"; down: {', '.join(down)}" if down else "")
    if not up:
        return failed("interfaces", detail)
    return Check("interfaces", MEASURED, detail, facts=tuple(up))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def check_names(
    forward: Callable[..., Any] = socket.getaddrinfo,
    reverse: Callable[..., Any] = socket.getnameinfo,
    patience_s: float = 5.0,
) -> Check:
    """Look up this machine's own name, and the name of its address, also in its IPv4-mapped form.

    That is what a TCPStore asks for in each connection, and what /etc/hosts seldom has.
    """
    host = socket.gethostname()
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def look() -> None:
        try:
            started = time.perf_counter()
            address = forward(host, None, type=socket.SOCK_STREAM)[0][4]
            middle = time.perf_counter()
            name = reverse(address[:2], 0)[0]
            last = time.perf_counter()
            if ":" not in address[0]:
                reverse((f"::ffff:{address[0]}", 0), 0)
            ends = (middle - started, last - middle, time.perf_counter() - last)
            found.put((name, address[0], *ends))
        except OSError as error:
            found.put(error)

    threading.Thread(target=look, daemon=True).start()
    try:
        answer = found.get(timeout=patience_s)
    except queue.Empty:
        return failed("names", f"no answer about {host} within {patience_s:g} s")
    if isinstance(answer, OSError):
        return failed("names", f"{host} cannot be looked up: {answer}")
    name, address, *seconds = answer
    ways = ("forward", "reverse", "mapped")
    times = {
        way: Value(spent, "s", ceiling=LOOKUP_S) for way, spent in zip(ways, seconds, strict=True)
    }
    detail = f"{host} is {address}, {address} is {name}"
    if is_loopback(address):
        detail += (
            "; no other host reaches that: on several hosts gloo needs GLOO_SOCKET_IFNAME, which "
            "msc run sets"
        )
    return passed("names", detail, **times)
