"""What a node tells of itself and its ranks, once a period, in one small datagram.

Everything in it is a state or a running total, so that lost beats lose nothing but time, and a
monitor that is restarted knows all with the next beats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import starmap
from types import MappingProxyType
from typing import NamedTuple

MAX_BYTES = 60_000
"""Of a beat: what fits into one UDP datagram."""


class RankBeat(NamedTuple):
    """One rank. state: "running", "stopped" or "dead"; phase, step: as its ring says; waits_s: how
    long it has waited in its last action, 0 if it does not; last: that action, as `kind channel`;
    started: how many communications it had started on each axis when its step began.
    """

    rank: int
    state: str
    phase: str
    step: int
    waits_s: float
    last: str
    started: Mapping[str, int]


class Beat(NamedTuple):
    """One node. sent_s: by its clock. ports: bytes received and sent, and errors, of each network
    interface. lines: of its logs that match a known error.
    """

    node: str
    sent_s: float
    ranks: tuple[RankBeat, ...]
    ports: Mapping[str, tuple[int, int, int]] = MappingProxyType({})
    lines: tuple[str, ...] = ()

    def to_bytes(self) -> bytes:
        """A datagram; lines are left out if it would be too long."""
        ranks = [
            [r.rank, r.state, r.phase, r.step, round(r.waits_s, 3), r.last, dict(r.started)]
            for r in self.ranks
        ]
        told = [self.node, self.sent_s, ranks, dict(self.ports)]
        data = json.dumps([*told, list(self.lines)], separators=(",", ":")).encode()
        if len(data) > MAX_BYTES:
            data = json.dumps([*told, []], separators=(",", ":")).encode()
        return data

    @staticmethod
    def from_bytes(data: bytes) -> Beat:
        """What `to_bytes` gave; `ValueError` for anything else."""
        try:
            node, sent, ranks, ports, lines = json.loads(str(data, "utf-8"))
            return Beat(
                str(node),
                float(sent),
                tuple(starmap(RankBeat, ranks)),
                {name: (a, b, c) for name, (a, b, c) in ports.items()},
                tuple(map(str, lines)),
            )
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"no beat: {error}") from error
