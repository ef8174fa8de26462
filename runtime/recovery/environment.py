"""The environment of a rank: that of torch's elastic launcher."""

from __future__ import annotations

from dataclasses import dataclass

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Layout:
    """Which ranks a run has, and where: `nproc` on each of `nnodes` nodes, in the nodes' order.

    run_id: the run's name, the same on all nodes; most_restarts: how often all may be started anew.
    """

    nproc: int
    nnodes: int
    run_id: str
    most_restarts: int

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.nproc * self.nnodes

    def node_of(self, rank: int) -> int:
        """The node that a rank is on."""
        return rank // self.nproc

    def environment(self, rank: int, host: str, port: int, restarts: int) -> dict[str, str]:
        """What a rank finds, as under torchrun.

        host, port: of the store, which the controller has; restarts: how often all ranks were
        started anew.
        """
        world = str(self.world)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.nproc),
            "ROLE_RANK": str(rank),
            "GROUP_RANK": str(self.node_of(rank)),
            "ROLE_NAME": "default",
            "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": str(self.nproc),
            "ROLE_WORLD_SIZE": world,
            "GROUP_WORLD_SIZE": str(self.nnodes),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.most_restarts),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
