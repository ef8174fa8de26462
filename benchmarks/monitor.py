"""What the monitor costs: beats of thousands of synthetic ranks, over UDP, at one a second.

    python benchmarks/monitor.py [--ranks 12288] [--seconds 80]; results/monitor.json

One process sends for all nodes of 8 ranks, spread over each second; the monitor is a process of its
own. Halfway some nodes fall silent, a rank of others stands still in a step that lasts. It prints
the monitor's share of one core, the beats that were lost, and whether the right ranks were named.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/monitor.py`

from benchmarks.hardware import hardware  # noqa: E402
from msc.monitor import open_inbox, watch  # noqa: E402
from msc.runtime.monitor.beat import Beat, RankBeat  # noqa: E402
from msc.runtime.monitor.watch import MISSED, STEP_TIME  # noqa: E402

RESULTS = Path(__file__).with_name("results")
PER_NODE = 8
STEP_S = 0.2


def beat_of(node: int, now: float, began: float, stands: bool) -> Beat:
    """A node whose ranks have taken a step each 0.2 s; the first one stands still if `stands`."""
    ranks = []
    for place in range(PER_NODE):
        until = began if stands else now
        step = int(until / STEP_S)
        waits = 0.0 if place == 0 or not stands else now - began
        counts = {"tp": 96 * step, "dp": 4 * step, "forward": 8 * step, "backward": 8 * step}
        rank = node * PER_NODE + place
        last = f"all_reduce tp:{','.join(str(node * PER_NODE + i) for i in range(PER_NODE))}"
        ranks.append(RankBeat(rank, "running", "step", step, waits, last, counts))
    moved = int(now / STEP_S) * 1_000_000
    ports = {f"mlx5_{port}:1": (moved, moved, 0) for port in range(8)}
    return Beat(f"node{node:04d}", now, tuple(ranks), ports)


def run_monitor(with_port: Any, told: Any, stop: Any) -> None:
    """The monitor's process: its events, and the share of a core that it took."""
    inbox = open_inbox(("127.0.0.1", 0))
    with_port.put(inbox.getsockname()[1])
    gc.disable()  # as the command does
    started, cpu = time.perf_counter(), time.process_time()
    found = [(e.kind, e.rank) for e in watch(inbox, 1.0, stop.is_set)]
    share = (time.process_time() - cpu) / (time.perf_counter() - started)
    told.put((found, share))


def lost_datagrams(port: int) -> int:
    """What the kernel has dropped at the monitor's socket."""
    for line in Path("/proc/net/udp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].partition(":")[2], 16) == port:
            return int(fields[-1])
    return -1


def measure(ranks: int, seconds: int, silent: Sequence[int], standing: Sequence[int]) -> Any:
    """Send for all nodes; the nodes in `silent` stop halfway, those in `standing` do not step."""
    context = multiprocessing.get_context("fork")
    with_port, told, stop = context.SimpleQueue(), context.SimpleQueue(), context.Event()
    monitor = context.Process(target=run_monitor, args=(with_port, told, stop))
    monitor.start()
    port = with_port.get()
    nodes = ranks // PER_NODE
    sent, half = 0, seconds / 2
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        began = time.time()
        for turn in range(seconds):
            for node in range(nodes):
                due = began + turn + node / nodes
                if node % 32 == 0:
                    time.sleep(max(due - time.time(), 0.0))
                late = due - began > half
                if not (late and node in silent):
                    stands = late and node in standing
                    beat = beat_of(node, due, began + half, stands)
                    out.sendto(beat.to_bytes(), ("127.0.0.1", port))
                    sent += 1
        took = time.time() - began
    lost = lost_datagrams(port)
    stop.set()
    events, share = told.get()
    monitor.join()
    return sent, took, lost, events, share


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=12288)
    parser.add_argument("--seconds", type=int, default=80)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args()
    silent, standing = (3, 700), (11, 900)
    sent, took, lost, events, share = measure(options.ranks, options.seconds, silent, standing)
    wanted = {(MISSED, node * PER_NODE + place) for node in silent for place in range(PER_NODE)}
    wanted |= {(STEP_TIME, node * PER_NODE) for node in standing}
    found = {(kind, rank) for kind, rank in events}
    result = {
        "hardware": hardware(),
        "ranks": options.ranks,
        "beats_per_second": sent / took,
        "share_of_a_core": share,
        "lost": lost,
        "named": sorted(found & wanted) == sorted(wanted),
        "false": len(found - wanted),
    }
    print(
        f"{options.ranks} ranks on {options.ranks // PER_NODE} nodes, "
        f"{sent / took:.0f} beats/s: {share:.1%} of a core, {lost} beats lost; "
        f"{len(found & wanted)} of {len(wanted)} faults named, {len(found - wanted)} false events"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "monitor.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
