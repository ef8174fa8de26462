"""The communicators of one real rank: `torch.distributed` groups by symbolic name and channel."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from msc.ir.errors import PlanError
from msc.ir.groups import Group
from msc.ir.mesh import Mesh
from msc.runtime.member_groups import member_group
from msc.runtime.recovery.sockets import recording, shut

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Communicator:
    """A group as its member sees it; `handle` is None where there is nobody else."""

    handle: dist.ProcessGroup | None
    members: tuple[int, ...]
    position: int


@dataclass(frozen=True)
class Channel:
    """How messages of one channel reach one peer."""

    handle: dist.ProcessGroup | None  # None: the default group
    peer: int  # global rank
    tag: int


class ProcessGroups:
    """Creates the groups that a program uses, and no other.

    `torch.distributed` must be initialized with `mesh.size` ranks. Every rank passes the names that
    its own program uses. Only members take part in creating a group; all ranks go through theirs in
    one total order, so that no two wait for each other in a ring.

    channels: the (channel, pp coordinate of the other side) of a program's sends and receives. On
        NCCL each channel of each pair has a communicator, since operations on one run in the order
        in which they start; gloo tells messages apart by tags.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        group_names: Iterable[str],
        channels: Iterable[tuple[str, int]] = (),
        timeout: timedelta | None = None,
    ) -> None:
        self.mesh = mesh
        self.rank = rank
        self.backend = str(dist.get_backend())
        self.device = device_of(self.backend)
        self._timeout = timeout
        self._check_world()
        here = mesh.coordinate(rank)
        wanted: dict[tuple[str, str, tuple[int, ...]], tuple[str, int]] = {}
        for name in group_names:
            wanted["group", name, Group.parse(name).members(mesh, rank)] = (name, 0)
        for channel, stage in channels:
            peer = mesh.rank({**here, "pp": stage})
            pair = (min(rank, peer), max(rank, peer))
            wanted["channel", channel, pair] = (channel, stage)
        self._groups: dict[str, Communicator] = {}
        self._channels: dict[tuple[str, int], Channel] = {}
        with recording():
            for kind, name, members in sorted(wanted):
                if kind == "group":
                    self._groups[name] = self._communicator(members)
                else:
                    self._channels[wanted[kind, name, members]] = self._channel(name, members)
        self._check_tags()

    def abort(self) -> None:
        """End what waits for other ranks with an error.

        An abort of gloo wakes nobody; what does is to shut its connections.
        """
        if self.backend == "gloo":
            shut()
            return
        handles = {each.handle for each in self._groups.values()}
        handles |= {each.handle for each in self._channels.values()}
        for handle in {*handles, dist.group.WORLD}:
            if handle is not None:
                handle.abort()

    def group(self, name: str) -> Communicator:
        """The communicator of a symbolic group name."""
        return self._groups[name]

    def channel(self, channel: str, stage: int) -> Channel:
        """How to reach the rank at pp coordinate `stage` on `channel`."""
        return self._channels[channel, stage]

    def _check_world(self) -> None:
        world = dist.get_world_size()
        if world != self.mesh.size or dist.get_rank() != self.rank:
            raise PlanError(
                f"Mesh {self.mesh} has {self.mesh.size} ranks and this program is for rank "
                f"{self.rank}, but this process is rank {dist.get_rank()} of {world}. "
                "Start as many processes as the mesh has ranks."
            )

    def _communicator(self, members: tuple[int, ...]) -> Communicator:
        handle = None if len(members) == 1 else member_group(members, self._timeout)
        return Communicator(handle, members, members.index(self.rank))

    def _channel(self, name: str, pair: tuple[int, ...]) -> Channel:
        peer = pair[1] if pair[0] == self.rank else pair[0]
        if self.backend == "gloo":
            return Channel(None, peer, _tag(name))
        return Channel(member_group(pair, self._timeout), peer, 0)

    def _check_tags(self) -> None:
        names = {channel for channel, _ in self._channels}
        if len({_tag(name) for name in names}) != len(names):
            raise PlanError(f"Channels {sorted(names)} have equal tags; rename one of them.")


def device_of(backend: str) -> torch.device:
    """Where the tensors of a backend live."""
    return torch.device("cuda", torch.cuda.current_device()) if "nccl" in backend else _CPU


def _tag(channel: str) -> int:
    """The same number on every rank; gloo adds no sign bit of its own below 2**31."""
    return zlib.crc32(channel.encode()) & 0x7FFFFFFF
