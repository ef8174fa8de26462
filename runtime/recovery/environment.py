"""The environment of a rank: that of torch's elastic launcher."""

from __future__ import annotations

import os

HOST = "127.0.0.1"


def rank_environment(
    rank: int, world: int, port: int, restarts: int, most_restarts: int
) -> dict[str, str]:
    """What a rank of one host finds, as under torchrun.

    port: of the store, which the agent has; restarts: how often all ranks were started anew.
    """
    size = str(world)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_NAME": "default",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(most_restarts),
        "TORCHELASTIC_RUN_ID": f"msc-{os.getpid()}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
