"""The environment of a rank: that of torch's elastic launcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from msc.ir.flags import FULL_WORLD_SIZE
from msc.runtime.recovery.places import Place

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Layout:
    """Which ranks a run has, and where: `nproc` on each of `nnodes` nodes, in the nodes' order.

    run_id: the run's name, the same on all nodes; most_restarts: how often all may be started anew;
    chosen: the places of the ranks, where there are fewer than the run was started for.
    """

    nproc: int
    nnodes: int
    run_id: str
    most_restarts: int
    chosen: tuple[Place, ...] | None = None

    @property
    def full(self) -> tuple[Place, ...]:
        """All places, in the order of the ranks that the run was started for."""
        return tuple(Place(n, s) for n in range(self.nnodes) for s in range(self.nproc))

    @property
    def places(self) -> tuple[Place, ...]:
        """The place of each rank."""
        return self.full if self.chosen is None else self.chosen

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.places)

    def on(self, places: Sequence[Place] | None) -> Layout:
        """The same run with ranks on these places only; None: on all."""
        return replace(self, chosen=None if places is None else tuple(places))

    def node_of(self, rank: int) -> int:
        """The node that a rank is on."""
        return self.places[rank].node

    def environment(self, rank: int, host: str, port: int, restarts: int) -> dict[str, str]:
        """What a rank finds, as under torchrun.

        host, port: of the store, which the controller has; restarts: how often all ranks were
        started anew. LOCAL_RANK is the slot, which names the device, so that with fewer ranks some
        numbers may be left out.
        """
        world = str(self.world)
        place = self.places[rank]
        nodes = sorted({each.node for each in self.places})
        here = sum(each.node == place.node for each in self.places)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(place.slot),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": str(nodes.index(place.node)),
            "ROLE_NAME": "default",
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(here),
            "ROLE_WORLD_SIZE": world,
            "GROUP_WORLD_SIZE": str(len(nodes)),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.most_restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            FULL_WORLD_SIZE.name: str(len(self.full)),
        }
