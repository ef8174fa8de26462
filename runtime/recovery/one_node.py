"""A run on one node: its controller and the node's agent in one process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msc.runtime.recovery.budget import Budget
from msc.runtime.recovery.controller import Controller
from msc.runtime.recovery.environment import HOST, Layout
from msc.runtime.recovery.events import Events
from msc.runtime.recovery.node import NodeAgent
from msc.runtime.recovery.roster import Node


def run_alone(
    arguments: Sequence[str],
    nproc: int,
    folder: Path,
    *,
    standbys: int = 0,
    budget: Budget,
    modules: Sequence[str] = (),
) -> int:
    """Run a script as `nproc` ranks on this host.

    arguments: the script and its own; folder: of the run, for rings and events; standbys: how many
    processes wait, with `modules` imported, to take a rank. The exit code is 0, that of the rank
    that failed, or 128 and a signal.
    """
    agent = NodeAgent(
        arguments, folder, standbys=standbys, modules=modules, recovers=budget.recovers
    )

    def send(command: str, /, **facts: Any) -> None:
        agent.obey(command, facts)

    node = Node(send)
    layout = Layout(nproc, 1, f"msc-{os.getpid()}", budget.restarts)
    controller = Controller(layout, HOST, budget, Events(folder))
    controller.joins(node, agent.state())
    with signals() as got:
        try:
            controller.turn()  # starts all ranks
            while controller.code is None:
                agent.turn()
                while agent.reports:
                    controller.hear(node, agent.reports.popleft())
                if got:
                    return 128 + got[0]
                controller.turn()
        finally:
            agent.end()
    return controller.code


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """The signals that have asked this process to stop; only a main thread can hear them."""
    got: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield got
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda n, _: got.append(n)) for number in numbers}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
