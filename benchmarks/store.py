"""The store traffic with which a job starts, replayed against a real TCPStore on this machine.

    python benchmarks/store.py --world 2048 12288 [--microbatches 8]; results/store.json

A GPT is compiled for pp=8, tp=8 and as many dp ranks as there are; which communicators each rank
needs is read off its rank graph, as `msc.runtime.process_groups` does. Every rank has a TCPStore
client of its own, a real socket, in a few processes; one process is the server. Phases, each begun
by all together:

    connect      each rank opens its one connection
    agree        each rank tells its facts; rank 0 gets all of them at once, and tells its verdict
    groups       the first member of each communicator puts NCCL's unique id, the others get it,
                 one key after the other, as torch does when a communicator is first used
    groups, multi_get    the same in one round trip per rank, which torch does not offer
    checkpoint   rank 0 names the attempt, all read it
    one barrier  as a comparison: what every communicator cost before torch 2.1

What is not replayed: NCCL's own bootstrap, imports, the launcher's rendezvous. And look-ups of
names: each client asks the resolver for the name of the server's address (which is IPv4-mapped, so
that /etc/hosts seldom has it), and where one answer in hundreds is lost, the connect storm takes 5
s for each. So this process and its children look up names in files alone, which takes root; `--dns`
leaves the machine's resolver as it is. `msc doctor` times such a look-up.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/store.py`

import msc  # noqa: E402
from benchmarks.hardware import hardware  # noqa: E402
from benchmarks.models import GPTConfig, GPTWithLoss  # noqa: E402
from msc.ir.communication import used_channels, used_groups  # noqa: E402
from msc.ir.groups import Group  # noqa: E402
from msc.ir.mesh import Mesh  # noqa: E402
from msc.ir.torch_private import TCPStore  # noqa: E402
from msc.program import Program  # noqa: E402

RESULTS = Path(__file__).with_name("results")
TIMEOUT = timedelta(seconds=300)
_NEW_MOUNTS, _BIND, _RECURSIVE, _PRIVATE = 0x20000, 0x1000, 0x4000, 0x40000  # of Linux
UNIQUE_ID = b"\0" * 128
FACTS = json.dumps({"program": "0" * 64, "seed": "0", "values": "0" * 64, "checkpoint": "x" * 80})
Names = dict[int, list[tuple[str, bool]]]
"""Per rank: the communicators that it needs, each with whether it puts the unique id."""


def compiled(mesh: Mesh, micro_batches: int) -> Program:
    """A small GPT on a large mesh: the communicators are those of any size of model."""
    config = GPTConfig(layers=8, hidden=64, heads=8, sequence=16, vocabulary=512)
    rows = mesh.axis_size("dp") * micro_batches
    tokens = torch.zeros(rows, config.sequence, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = GPTWithLoss(config)
    return msc.compile(
        model,
        (tokens, tokens),
        mesh=mesh,
        microbatches=micro_batches,
        zero=1,
        optimizer=msc.AdamW(max_norm=1.0),
    )


def communicators(program: Program, ranks: Sequence[int]) -> Names:
    """Those of NCCL: a group of several ranks, and each channel of each pair of stages."""
    mesh = program.mesh
    found: Names = {}
    used: dict[int, tuple[list[str], list[tuple[str, int]]]] = {}  # ranks share their graphs
    for rank in ranks:
        graph = program.rank_graph(rank)
        if id(graph) not in used:
            used[id(graph)] = sorted(used_groups(graph)), sorted(used_channels(graph))
        groups, channels = used[id(graph)]
        here = mesh.coordinate(rank)
        names = []
        for name in groups:
            group = Group.parse(name)
            if group.size(mesh) > 1:
                first = group.key(mesh, here)
                names.append((f"{name}/{first}", first == tuple(here.values())))
        for channel, stage in channels:
            peer = mesh.rank({**here, "pp": stage})
            pair = sorted((rank, peer))
            names.append((f"{channel}/{pair[0]}/{pair[1]}", rank == pair[0]))
        found[rank] = sorted(set(names))
    return found


@dataclass
class Client:
    """The ranks of one process, and their connections."""

    names: Names
    world: int
    barrier: Barrier
    port: int

    def run(self, out: Any) -> None:
        """All phases; the seconds of each, and its round trips, go to `out`."""
        gc.disable()
        found: dict[str, tuple[float, int]] = {}
        self.stores: dict[int, TCPStore] = {}
        phases: dict[str, Callable[[], int]] = {
            "connect": self.connect,
            "agree": self.agree,
            "groups": lambda: self.groups("a", at_once=False),
            "groups, multi_get": lambda: self.groups("b", at_once=True),
            "checkpoint": self.checkpoint,
            "one barrier": self.one_barrier,
        }
        for name, phase in phases.items():
            self.barrier.wait()
            started = time.perf_counter()
            trips = phase()
            found[name] = time.perf_counter() - started, trips
            self.barrier.wait()
        out.put(found)
        self.barrier.wait()  # connections stay until all have told

    def connect(self) -> int:
        for rank in self.names:
            self.stores[rank] = TCPStore(
                "127.0.0.1", self.port, None, False, TIMEOUT, wait_for_workers=False
            )
        return len(self.names)

    def agree(self) -> int:
        trips = 0
        for rank, store in self.stores.items():
            store.set(f"facts/{rank}", FACTS)
            trips += 1
        if 0 in self.stores:
            keys = [f"facts/{rank}" for rank in range(1, self.world)]
            self.stores[0].wait(keys, TIMEOUT)
            assert len(self.stores[0].multi_get(keys)) == self.world - 1
            self.stores[0].set("verdict", "")
            trips += 3
        for store in self.stores.values():
            store.wait(["verdict"], TIMEOUT)
            store.get("verdict")
            trips += 2
        return trips

    def groups(self, turn: str, at_once: bool) -> int:
        trips = 0
        for rank, store in self.stores.items():
            for name, puts in self.names[rank]:
                if puts:
                    store.set(f"{turn}/{name}", UNIQUE_ID.decode())
                    trips += 1
        for rank, store in self.stores.items():
            keys = [f"{turn}/{name}" for name, puts in self.names[rank] if not puts]
            if at_once and keys:
                store.multi_get(keys)
                trips += 1
            elif not at_once:
                for key in keys:
                    store.get(key)
                trips += len(keys)
        return trips

    def checkpoint(self) -> int:
        if 0 in self.stores:
            self.stores[0].set("checkpoint", "0" * 8)
            self.stores[0].set("save after", "-1")
        for store in self.stores.values():
            store.wait(["checkpoint"], TIMEOUT)
            store.get("checkpoint")
        return 2 * len(self.stores) + 2 * (0 in self.stores)

    def one_barrier(self) -> int:
        for store in self.stores.values():
            if store.add("barrier", 1) == self.world:
                store.set("all", "")
        for store in self.stores.values():
            store.wait(["all"], TIMEOUT)
        return 2 * len(self.stores)


def measure(mesh: Mesh, micro_batches: int, processes: int) -> dict[str, Any]:
    """Seconds of each phase: the slowest process's."""
    program = compiled(mesh, micro_batches)
    names = communicators(program, range(mesh.size))
    distinct = {name for each in names.values() for name, _ in each}
    context = multiprocessing.get_context("fork")
    barrier, out = context.Barrier(processes), context.SimpleQueue()
    with_port = context.SimpleQueue()
    server = context.Process(target=_serve, args=(with_port, stop := context.Event(), out))
    server.start()
    port = with_port.get()
    parts = [
        {rank: names[rank] for rank in range(first, mesh.size, processes)}
        for first in range(processes)
    ]
    clients = [
        context.Process(target=Client(part, mesh.size, barrier, port).run, args=(out,))
        for part in parts
    ]
    for client in clients:
        client.start()
    told = [out.get() for _ in clients]
    for client in clients:
        client.join()
    stop.set()
    cpu_s, peak_mib = out.get()
    server.join()
    phases = {
        name: {
            "seconds": max(each[name][0] for each in told),
            "round_trips": sum(each[name][1] for each in told),
        }
        for name in told[0]
    }
    job = [name for name in phases if name not in ("groups, multi_get", "one barrier")]
    return {
        "world": mesh.size,
        "mesh": str(mesh),
        "communicators": len(distinct),
        "communicators_of_a_rank": max(len(each) for each in names.values()),
        "phases": phases,
        "job_s": sum(phases[name]["seconds"] for name in job),
        "server_cpu_s": cpu_s,
        "server_peak_mib": peak_mib,
    }


def look_up_in_files() -> None:
    """Let this process and its children look up names in files alone, by a mount of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("hosts: files\n")
        file.flush()
        calls: tuple[Callable[[], int], ...] = (
            lambda: libc.unshare(_NEW_MOUNTS),
            lambda: libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None),
            lambda: libc.mount(file.name.encode(), b"/etc/nsswitch.conf", None, _BIND, None),
        )
        for call in calls:
            if call():
                error = os.strerror(ctypes.get_errno())
                raise SystemExit(f"look-ups cannot be kept from DNS ({error}): pass --dns.")


def _serve(with_port: Any, stop: Any, out: Any) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, TIMEOUT, wait_for_workers=False)
    started = time.process_time()
    with_port.put(store.port)
    stop.wait()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    out.put((time.process_time() - started, peak))


def table(found: Sequence[dict[str, Any]]) -> str:
    """A line for each phase, a pair of columns for each size."""
    lines = ["phase".ljust(20) + "".join(f"{each['world']} ranks".rjust(26) for each in found)]
    for name in found[0]["phases"]:
        cells = []
        for each in found:
            phase = each["phases"][name]
            cells.append(f"{phase['seconds']:9.2f} s {phase['round_trips']:8} trips".rjust(26))
        lines.append(name.ljust(20) + "".join(cells))
    job = "".join(f"{each['job_s']:9.2f} s".ljust(17).rjust(26) for each in found)
    lines.append("the job".ljust(20) + job)
    for each in found:
        lines.append(
            f"{each['world']} ranks, {each['mesh']}: {each['communicators']} communicators, "
            f"at most {each['communicators_of_a_rank']} of a rank; server "
            f"{each['server_cpu_s']:.1f} CPU s, {each['server_peak_mib']:.0f} MiB"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--world", type=int, nargs="+", default=[2048, 12288])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--processes", type=int, default=4, help="that hold the clients")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    parser.add_argument("--dns", action="store_true", help="look up names as the machine does")
    options = parser.parse_args()
    if not options.dns:
        look_up_in_files()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max(options.world) + 1000
    if hard != resource.RLIM_INFINITY and hard < needed:
        parser.error(f"{needed} open files are needed, and the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    load = [os.getloadavg()[0]]
    found = []
    for world in options.world:
        if world % 64:
            parser.error(f"--world {world} is no multiple of pp=8, tp=8")
        mesh = Mesh.parse(f"pp=8,dp={world // 64},tp=8")
        found.append(measure(mesh, options.microbatches, options.processes))
    load.append(os.getloadavg()[0])
    print(table(found))
    print(f"load average {load[0]:.1f} to {load[1]:.1f}")
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"hardware": hardware(), "load_average": load, "dns": options.dns, "runs": found}
    (options.out / "store.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
