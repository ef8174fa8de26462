"""The controller of a run on several nodes, in a process of its own that has no rank.

The agent that has the run's address starts it as `python -m ... HANDLE JSON`: the socket that it
listens on, and a `Settings`. It outlives that agent as long as others are connected.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msc.runtime.recovery.addresses import is_loopback
from msc.runtime.recovery.budget import Budget
from msc.runtime.recovery.controller import Controller
from msc.runtime.recovery.environment import Layout
from msc.runtime.recovery.events import Events
from msc.runtime.recovery.pool import TICK_S
from msc.runtime.recovery.roster import Node
from msc.runtime.recovery.wire import LARGEST, Wire, is_proof, proof, token_of

BEAT_S = 0.5
"""Between two signs of life, in both directions."""
SILENT_S = 2.5
"""How long the other side may give no sign of life."""
_STRANGER_S = 5.0
"""How long who has not proved to be of the run may stay."""
_END_S = 5.0
"""How long agents may take to hear that the run is over."""
_ALONE_S = 3.0
"""How long no agent is connected before a controller ends whose own agent is gone."""


@dataclass(frozen=True)
class Settings:
    """What a controller is started with."""

    layout: Layout
    host: str
    budget: Budget
    folder: str
    spares: int
    patience_s: float
    copies: bool
    starter: int

    def to_json(self) -> str:
        """As one word of a command."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> Settings:
        """What `to_json` has made."""
        data = json.loads(text)
        parts = {"layout": Layout(**data["layout"]), "budget": Budget(**data["budget"])}
        return Settings(**{**data, **parts})


@dataclass(eq=False)
class _Guest:
    """A connection, and the node once that has proved to be of the run.

    host: from where it came; reached: by which of this host's addresses; agent: tells its agent
    from all others.
    """

    wire: Wire
    host: str
    reached: str
    agent: str = ""
    challenge: str = field(default_factory=lambda: secrets.token_hex(16))
    node: Node | None = None


class Service:
    """Lets agents take part in what a controller decides."""

    def __init__(self, listener: socket.socket, settings: Settings) -> None:
        self._settings = settings
        self._layout = settings.layout
        self._token = token_of(settings.layout.run_id)
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._guests: list[_Guest] = []
        self._known_as: str | None = None  # by hosts other than this one
        self._events = Events(Path(settings.folder))
        self._controller = Controller(
            settings.layout,
            settings.host,
            settings.budget,
            self._events,
            spares=settings.spares,
            patience_s=settings.patience_s,
            copies=settings.copies,
        )
        self._met = time.monotonic()

    def run(self) -> None:
        """Serve until the run is over, or nobody is left."""
        beat = 0.0
        while self._controller.code is None:
            if any(key.fileobj is self._listener for key, _ in self._selector.select(TICK_S)):
                self._accept()
            for guest in list(self._guests):
                if guest in self._guests:  # else another one has taken its place just now
                    self._hear(guest)
            self._controller.turn()
            now = time.monotonic()
            if now >= beat:
                beat = now + BEAT_S
                self._tell_all("beat")
            for guest in self._guests:
                guest.wire.flush()
            if self._guests:
                self._met = now
            elif os.getppid() != self._settings.starter and now - self._met > _ALONE_S:
                return
        self._tell_all("end", code=self._controller.code)
        end = time.monotonic() + _END_S
        while self._guests and time.monotonic() < end:
            self._selector.select(TICK_S)
            for guest in list(self._guests):
                guest.wire.flush()
                if not guest.wire.receive()[1]:
                    self._drop(guest)

    def _tell_all(self, command: str, **facts: Any) -> None:
        for guest in self._guests:
            if guest.node is not None:
                guest.node.send(command, **facts)

    def _accept(self) -> None:
        connection, address = self._listener.accept()
        guest = _Guest(Wire(connection), address[0], connection.getsockname()[0])
        self._guests.append(guest)
        self._selector.register(guest.wire, selectors.EVENT_READ)
        guest.wire.send(guest.challenge)

    def _hear(self, guest: _Guest) -> None:
        messages, is_open = guest.wire.receive()
        for message in messages:
            if guest.node is not None:
                if message["event"] == "leaves":
                    self._lose(guest, message["why"], TICK_S)
                    return
                if message["event"] != "beat":
                    self._controller.hear(guest.node, message)
            elif not self._welcome(guest, message):
                return
        silent = time.monotonic() - guest.wire.heard
        if not is_open:
            self._lose(guest, "its agent has closed its connection, or died", TICK_S)
        elif silent > (_STRANGER_S if guest.node is None else SILENT_S):
            self._lose(guest, f"its agent has been silent for {silent:.1f} s", silent)

    def _welcome(self, guest: _Guest, hello: Any) -> bool:
        """Let an agent in; whether it is."""
        wire = guest.wire
        if not isinstance(hello, dict) or not is_proof(
            self._token, guest.challenge, hello.get("proof")
        ):
            self._events.say(f"a connection from {guest.host} was closed: it is not of this run")
            self._drop(guest)
            return False

        for other in self._guests:
            if other.node is not None and other.agent == hello["agent"]:
                self._lose(other, "its agent has connected anew", TICK_S)
                break
        before: list[Any] = []  # what it is told before it is let in, it hears after

        def send(command: str, /, **facts: Any) -> None:
            message = {"command": command, "facts": facts}
            if guest.node is None:
                before.append(message)
            else:
                wire.send(message)

        node = Node(send, hello["name"], (guest.host, hello["port"]), hello["wish"])
        theirs, mine = hello["layout"], [self._layout.nnodes, self._layout.nproc]
        if theirs == mine:
            refusal, keeps = self._controller.joins(node, hello["state"])
        else:
            refusal, keeps = _other_layout(theirs, mine), False
        shown = proof(self._token, hello["proof"])
        wire.send({"proof": shown, "refusal": refusal, "keeps": keeps})
        if refusal:
            return True  # it closes the connection when it has read that
        guest.node, guest.agent = node, hello["agent"]
        wire.largest = LARGEST
        if self._known_as is None and not is_loopback(guest.host):
            self._known_as = guest.reached
            for other in self._guests:
                self._tell_name(other)
        else:
            self._tell_name(guest)
        for message in before:
            wire.send(message)
        return True

    def _tell_name(self, guest: _Guest) -> None:
        """Let an agent know the address by which the others reach its host."""
        if self._known_as is not None and is_loopback(guest.host):
            guest.host = self._known_as  # it is on this host
        if guest.node is not None:
            guest.node.address = guest.host, guest.node.address[1]
            guest.node.send("known as", host=guest.host)

    def _lose(self, guest: _Guest, why: str, detect_s: float) -> None:
        node = guest.node
        self._drop(guest)
        if node is not None:
            self._controller.loses(node, why, detect_s)

    def _drop(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        self._selector.unregister(guest.wire)
        guest.wire.close()


def _other_layout(theirs: Sequence[int], mine: Sequence[int]) -> str:
    one, other = (f"--nnodes {nnodes} --nproc {nproc}" for nnodes, nproc in (theirs, mine))
    return f"it was started with {one}, and the run with {other}"


def main() -> None:
    """Be the controller."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    Service(listener, Settings.from_json(sys.argv[2])).run()


if __name__ == "__main__":
    main()
