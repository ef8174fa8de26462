"""A node of a run on several: its agent, connected with the controller of the run.

The node that has the run's address also starts the controller, and starts it anew if it dies.
While no controller answers, the ranks go on training, and the agent tries to reach one.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msc.ir.errors import InputError
from msc.runtime.recovery.addresses import (
    gloo_interface,
    gloo_reaches_others,
    is_loopback,
    listening_host,
)
from msc.runtime.recovery.controller_process import BEAT_S, SILENT_S, Settings
from msc.runtime.recovery.node import NodeAgent
from msc.runtime.recovery.one_node import signals
from msc.runtime.recovery.pool import TICK_S
from msc.runtime.recovery.wire import (
    LARGEST,
    Wire,
    is_proof,
    proof,
    receive_frame,
    send_frame,
    token_of,
)

_MODULE = "msc.runtime.recovery.controller_process"
_AGAIN_S = 0.2
"""Between two tries to reach the controller."""
_ANSWER_S = 5.0
"""How long it may take to answer."""
_REFUSED_S = 2 * SILENT_S
"""How long a node asks again that is refused: one that is lost may still have its place."""
_WORD_S = 15.0
"""Between two words of a node that it waits for a controller."""
_LIVES = 10
"""How often a controller is started anew."""


@dataclass(frozen=True)
class Meeting:
    """Where and how a node meets the others of its run.

    address: the run's, at which its controller listens; wish: the number that this node wants to
    have, None for any; it or none of 0 makes it start the controller if the address is its own.
    """

    address: tuple[str, int]
    wish: int | None


class ClusterNode:
    """Runs the agent of one node until the run is over.

    settings: those of the controller; arguments, standbys, modules: see `NodeAgent`.
    """

    def __init__(
        self,
        meeting: Meeting,
        settings: Settings,
        arguments: Sequence[str],
        *,
        standbys: int,
        modules: Sequence[str],
    ) -> None:
        self._meeting = meeting
        self._settings = settings
        self._layout = settings.layout
        self._token = token_of(self._layout.run_id)
        self._listener = _listener(meeting)
        self._controller: subprocess.Popen[bytes] | None = None
        self._lives = _LIVES
        self._recovers = settings.budget.replacements + settings.budget.restarts > 0
        self._agent = NodeAgent(
            arguments,
            Path(settings.folder),
            standbys=standbys,
            modules=modules,
            recovers=self._recovers,
            token=self._token,
        )
        self._wire: Wire | None = None
        self._code: int | None = None
        self._over = False  # the run, not this node's part in it
        self._gloo_reaches_others = gloo_reaches_others()
        self._name = secrets.token_hex(8)
        self._refused: float | None = None
        self._heard = time.monotonic()
        self._next_try = 0.0
        self._next_word = time.monotonic() + _WORD_S
        self._next_beat = 0.0

    def run(self) -> int:
        """Run to the end; the exit code of the run, 1 without a controller, or 128 and a signal."""
        with signals() as got:
            try:
                while self._code is None:
                    self._watch_controller()
                    if self._wire is None:
                        self._reach()
                    else:
                        self._turn(self._wire)
                    if got:
                        self._leave(got[0])
            finally:
                self._close()
        return self._code

    def _close(self) -> None:
        if self._wire is not None:
            self._part(self._wire)
        self._agent.end()
        if self._listener is not None:
            self._listener.close()
        if self._controller is not None and self._over:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for slower nodes
                self._controller.wait(_ANSWER_S)

    # -- the controller

    def _watch_controller(self) -> None:
        """Start the controller, or start it anew, if it is for this node to do so."""
        if self._listener is None:
            return
        if self._controller is not None:
            code = self._controller.poll()
            if code is None:
                return
            if not self._lives:
                _say(f"the controller has died {_LIVES} times (exit code {code}); this node ends")
                self._code = 1
                return
            self._lives -= 1
            _say(f"the controller of the run died (exit code {code}); it is started again")
        handle = self._listener.fileno()
        command = [sys.executable, "-m", _MODULE, str(handle), self._settings.to_json()]
        self._controller = subprocess.Popen(command, pass_fds=[handle], start_new_session=True)

    def _reach(self) -> None:
        now = time.monotonic()
        if now - self._heard > self._settings.patience_s:
            host, port = self._meeting.address
            _say(
                f"no controller has answered at {host}:{port} for "
                f"{self._settings.patience_s:.0f} s; this node ends"
            )
            self._code = 1
            return
        if now < self._next_try:
            time.sleep(TICK_S)
            return
        self._next_try = now + _AGAIN_S
        try:
            self._greet(socket.create_connection(self._meeting.address, _ANSWER_S))
        except OSError as error:
            if now > self._next_word:
                self._next_word = now + _WORD_S
                self._say_that_it_waits(now, error)

    def _say_that_it_waits(self, now: float, error: OSError) -> None:
        host, port = self._meeting.address
        left = self._settings.patience_s - (now - self._heard)
        first = "" if self._meeting.wish == 0 else "; node 0 of the run must be started there"
        _say(
            f"no controller answers at {host}:{port} ({error}){first}; asking for {left:.0f} s more"
        )

    def _greet(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_ANSWER_S)
            shown = proof(self._token, str(receive_frame(connection)))
            hello = {
                "proof": shown,
                "agent": self._name,
                "name": socket.gethostname(),
                "wish": self._meeting.wish,
                "layout": [self._layout.nnodes, self._layout.nproc],
                "port": self._agent.port,
                "state": self._agent.state(),
            }
            send_frame(connection, hello)
            answer = receive_frame(connection)
        except OSError:
            connection.close()
            raise
        if not is_proof(self._token, shown, answer.get("proof")):
            connection.close()
            raise ConnectionError("what listens there is not of this run")
        if answer["refusal"]:
            connection.close()
            self._agent.give_up()
            self._hear_no(answer["refusal"])
            return
        self._refused = None
        if not answer["keeps"]:
            if self._agent.has_ranks:
                _say("this node was given up by its run: its ranks are killed")
            self._agent.give_up()
        self._agent.told = None
        self._wire = Wire(connection, LARGEST)
        self._agent.pool.listen(self._wire)

    def _hear_no(self, why: str) -> None:
        """This node cannot be one of the run, unless another is about to be found lost."""
        self._heard = now = time.monotonic()
        self._refused = self._refused or now
        if now - self._refused > _REFUSED_S:
            _say(f"this node cannot be one of the run: {why}")
            self._code = 1

    def _turn(self, wire: Wire) -> None:
        """Hear the controller, look after the ranks, and tell."""
        messages, is_open = wire.receive()
        for message in messages:
            self._obey(message["command"], message["facts"])
        self._heard = wire.heard
        if not is_open or time.monotonic() - wire.heard > SILENT_S:
            self._part(wire)
            return
        if self._code is not None:
            return
        self._agent.turn()
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._agent.tell_snapshots()
            wire.send({"event": "beat"})
        while self._agent.reports:
            wire.send(self._agent.reports.popleft())
        wire.flush()

    def _obey(self, command: str, facts: dict[str, Any]) -> None:
        if command == "end":
            self._code, self._over = facts["code"], True
        elif command == "known as":
            self._agent.variables = self._network_variables(facts["host"])
        elif command != "beat":
            self._agent.obey(command, facts)

    def _network_variables(self, host: str) -> dict[str, str]:
        """What ranks need for others to reach them, where this host is known as `host`."""
        if self._gloo_reaches_others or is_loopback(host):
            return {}
        found = gloo_interface(host)
        if found is None:
            _say(
                f"other hosts reach this one at {host}, which none of its interfaces has, and not "
                f"by the address of its name, {socket.gethostname()}: set GLOO_SOCKET_IFNAME to "
                "the interface that gloo is to use"
            )
        return found or {}

    def _part(self, wire: Wire) -> None:
        if self._code is None:
            _say("the connection with the run's controller is lost; ranks go on, it is looked for")
        if self._controller is not None and time.monotonic() - wire.heard > SILENT_S:
            self._controller.kill()  # it is frozen, and is to be started anew
        self._agent.pool.ignore(wire)
        wire.close()
        self._wire = None
        self._agent.reports.clear()

    def _leave(self, number: int) -> None:
        """This node was asked to stop: its run is told, so that it need not find out."""
        self._code = 128 + number
        if self._wire is not None:
            name = signal.Signals(number).name
            self._wire.send({"event": "leaves", "why": f"it was asked to stop ({name})"})


def _listener(meeting: Meeting) -> socket.socket | None:
    """The socket at the run's address; None if that is another node's to have.

    Raises `InputError` if this node is to have it, and cannot.
    """
    if meeting.wish not in (None, 0):
        return None
    host, port = meeting.address
    try:
        return socket.create_server((listening_host(host), port), backlog=1024)
    except OSError as error:
        if meeting.wish == 0 and not _answers(meeting.address):
            raise InputError(
                f"Node 0 cannot listen at {host}:{port}: {error}. --rdzv is an address of node 0 "
                "that the others reach."
            ) from error
        return None


def _answers(address: tuple[str, int]) -> bool:
    """Whether somebody listens there: a controller that has outlived its agent."""
    try:
        socket.create_connection(address, _ANSWER_S).close()
    except OSError:
        return False
    return True


def _say(text: str) -> None:
    print(f"msc: {text}", file=sys.stderr, flush=True)
