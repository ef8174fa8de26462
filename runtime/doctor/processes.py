"""Ranks on this machine for the checks between processes, forked so that they need no imports."""

from __future__ import annotations

import json
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from msc.ir.torch_private import Store, TCPStore
from msc.runtime.doctor.between import check_peers
from msc.runtime.doctor.check import Check, failed
from msc.runtime.doctor.peers import Peers

PeersOf = Callable[[Store, int, int, int, torch.device, timedelta, str], Peers]


class LocalRanks:
    """`world` processes that run the checks between processes; start it before any threads run.

    size: bytes that a pair exchanges. timeout_s: for each check. version: of MSC.
    peers_of: makes a rank's `Peers`.
    """

    def __init__(
        self, world: int, size: int, timeout_s: float, version: str, peers_of: PeersOf = Peers
    ) -> None:
        self._timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="msc-doctor-")
        self._file = Path(self._folder.name) / "found.json"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        self._world = world
        context = multiprocessing.get_context("fork")
        self._ranks = [
            context.Process(
                target=_run_rank,
                args=(self._port, self._file, rank, world, size, timeout_s, version, peers_of),
                daemon=True,
            )
            for rank in range(world)
        ]

    def start(self) -> None:
        """Start them; they begin at once. The store is here, so that no rank leaves too early."""
        for rank in self._ranks:
            rank.start()
        self._store = _connect(self._port, self._world, True, self._timeout_s)

    def finish(self) -> list[Check]:
        """What rank 0 has found; ranks that do not end in time are ended, and named."""
        end = time.monotonic() + 3 * self._timeout_s
        for rank in self._ranks:
            rank.join(max(end - time.monotonic(), 0))
        late = tuple(n for n, rank in enumerate(self._ranks) if rank.is_alive())
        dead = tuple(n for n, rank in enumerate(self._ranks) if rank.exitcode not in (0, None))
        for number in late:
            self._ranks[number].kill()
            self._ranks[number].join()
        told = json.loads(self._file.read_text()) if self._file.exists() else []
        found = [Check.from_json(each) for each in told]
        self._folder.cleanup()
        if late:
            found.append(failed("processes", f"ranks {late} did not end in time"))
        if dead:
            codes = [self._ranks[number].exitcode for number in dead]
            found.append(failed("processes", f"ranks {dead} ended with {codes}"))
        if not found:
            found.append(failed("processes", "rank 0 found nothing"))
        return found


def _run_rank(
    port: int,
    file: Path,
    rank: int,
    world: int,
    size: int,
    timeout_s: float,
    version: str,
    peers_of: PeersOf,
) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    store = _connect(port, world, False, timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    peers = peers_of(store, rank, world, size, torch.device("cpu"), timeout, version)
    found = check_peers(peers, dist.group.WORLD, range(world))
    if rank == 0:
        file.write_text(json.dumps([check.to_json() for check in found]))


def _connect(port: int, world: int, master: bool, timeout_s: float) -> TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return TCPStore("127.0.0.1", port, world, master, timeout, wait_for_workers=False)
