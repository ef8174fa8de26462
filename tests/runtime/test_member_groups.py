"""Groups that overlap, of members that have made different numbers of groups before."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from msc.runtime.member_groups import member_group

GROUPS = ((0, 1), (1, 2), (0, 2), (1, 2), (0, 1))


def work(rank: int, folder: str) -> None:
    for generation in range(2):  # the numbers begin again with the default group
        store = dist.FileStore(f"{folder}/store{generation}", 3)  # type: ignore[attr-defined]
        timeout = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timeout)
        for members in GROUPS:
            if rank in members:
                group = member_group(members, timeout)
                value = torch.tensor([10.0**rank])
                dist.all_reduce(value, group=group)
                assert float(value) == sum(10.0**member for member in members)
                dist.broadcast(value, members[1], group=group)
        dist.destroy_process_group()
    Path(folder, f"done{rank}").touch()


@pytest.mark.gloo
def test_members_that_have_made_other_groups_before(tmp_path: Path) -> None:
    spawn(work, (str(tmp_path),), nprocs=3)  # type: ignore[no-untyped-call]
    assert all((tmp_path / f"done{rank}").exists() for rank in range(3))
