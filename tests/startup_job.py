"""What tests/test_startup.py runs in every rank: join a job, and count what that took.

python startup_job.py FOLDER MESH..      writes FOLDER/MESH.RANK.json
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import msc
from msc.ir.communication import used_groups
from msc.ir.groups import Group
from msc.launch import launch, under_torchrun
from msc.runtime import member_groups
from tests.checkpoint.job import Rows
from tests.checkpoint.runs import program

NPROC = 2


def store_connections() -> int:
    """How many sockets of this process are connected to the store's port."""
    port = int(os.environ["MASTER_PORT"])
    own = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue  # the listing's own
    found = 0
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            found += fields[9] in own and int(fields[2].rpartition(":")[2], 16) == port
    return found


def run(folder: Path, mesh: str) -> None:
    made: list[list[int]] = []
    groups: Any = member_groups
    new_group, named_group = dist.new_group, groups.named_group

    def counted(members: Sequence[int], *args: Any) -> Any:
        made.append(list(members))
        return named_group(members, *args)

    def refused(*args: Any, **options: Any) -> Any:
        raise AssertionError("all ranks of the job take part in new_group")

    compiled = program(mesh)
    dist.new_group, groups.named_group = refused, counted
    try:
        with msc.Trainer(compiled, Rows(), log=False) as trainer:
            trainer.fit(1)
            rank = trainer.rank
            names = used_groups(compiled.rank_graph(rank))
            used = [Group.parse(name).members(compiled.mesh, rank) for name in names]
            found = {
                "connections": store_connections(),
                "made": sorted(made),
                "used": sorted(list(each) for each in used if len(each) > 1),
            }
    finally:
        dist.new_group, groups.named_group = new_group, named_group
    (folder / f"{mesh}.{rank}.json").write_text(json.dumps(found))


def main() -> int:
    if not under_torchrun():
        return launch(sys.argv, NPROC)
    torch.set_num_threads(1)
    for mesh in sys.argv[2:]:
        run(Path(sys.argv[1]), mesh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
