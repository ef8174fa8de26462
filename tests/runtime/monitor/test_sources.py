"""What a node's beat is made of."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from msc.runtime.diagnosis.ring import Ring, read_ring
from msc.runtime.monitor.sources import LogTail, port_counters, rank_beat


def test_a_rank_as_its_ring_says(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring", 3, ["dp:1,3", "forward:1>3", "tp:2,3"], capacity=8)
    for step in (1, 2):
        ring.phase("step", step)
        for channel in ("tp:2,3", "tp:2,3", "forward:1>3"):
            ring.leave(ring.enter(ring.start("all_reduce", channel, 64)))
    token = ring.start("all_reduce", "dp:1,3", 64)
    beat = rank_beat(tmp_path / "ring")
    assert beat[:4] == (3, "running", "step", 2)
    assert (beat.waits_s, beat.last) == (0.0, "all_reduce dp:1,3")
    assert beat.started == {"dp": 0, "forward": 1, "tp": 2}  # as the step began
    ring.enter(token)
    beat = rank_beat(tmp_path / "ring")
    assert 0 < beat.waits_s < time.time()
    assert beat.last == "wait dp:1,3"
    whole = read_ring(tmp_path / "ring")
    for last in (1, 3, 8, 100):
        view = read_ring(tmp_path / "ring", last=last)
        assert view.records == whole.records[-last:]
        assert (view.step, view.in_step) == (whole.step, whole.in_step)


def test_ports_as_sysfs_counts_them(tmp_path: Path) -> None:
    statistics = tmp_path / "net" / "eth0" / "statistics"
    statistics.mkdir(parents=True)
    for name, value in (("rx_bytes", 10), ("tx_bytes", 20), ("rx_errors", 1), ("tx_errors", 2)):
        (statistics / name).write_text(f"{value}\n")
    counters = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    for name, value in (("port_rcv_data", 5), ("port_xmit_data", 6), ("link_downed", 7)):
        (counters / name).write_text(f"{value}\n")
    assert port_counters(tmp_path) == {"eth0": (10, 20, 3), "mlx5_0:1": (20, 24, 7)}
    assert port_counters(tmp_path / "none") == {}


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: CUDA error: an illegal memory access",
        "[rank3] NCCL WARN Net: ibv_poll_cq error",
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus",
        "Out of memory: Killed process 71 (python)",
        "OSError: [Errno 28] No space left on device",
    ],
)
def test_new_lines_with_known_errors_are_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    def unreadable(*_: object) -> None:
        raise PermissionError("for a moment")

    log = tmp_path / "log"
    log.write_text(f"{line} before\n")
    tail = LogTail([log, tmp_path / "missing"])
    assert tail.lines() == []
    with log.open("a") as file:
        file.write(f"step 3, loss 2.5\n{line}\nnext, not yet whole: {line}")
    assert tail.lines() == [line]
    with log.open("a") as file:
        file.write("!\n")
    assert tail.lines() == [f"next, not yet whole: {line}!"]
    assert tail.lines() == []
    log.write_text(f"{line}\n")  # begun anew, and shorter
    assert tail.lines() == [line]
    with log.open("a") as file:
        file.write(f"{line}!\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", unreadable)
        assert tail.lines() == []
    assert tail.lines() == [f"{line}!"]
