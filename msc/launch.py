"""Start the ranks of a script on this machine, through torch's elastic launcher."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from msc.ir.errors import PlanError
from msc.ranks import under_torchrun

__all__ = ["launch", "under_torchrun"]


def launch(script_args: Sequence[str], nproc: int) -> int:
    """Run `python *script_args` in `nproc` processes as ranks 0 to nproc-1; returns the exit code.

    `script_args` are a script and its arguments, such as `sys.argv`. Output goes where this
    process's goes. When a rank fails the others are stopped, and its exit code is returned; when
    this process is asked to stop, the ranks are stopped too. Each rank gets one thread unless
    OMP_NUM_THREADS says otherwise. Use it as

        if not under_torchrun():
            sys.exit(launch(sys.argv, mesh.size))
    """
    if under_torchrun():
        raise PlanError("This process is a rank already; only the process above starts ranks.")
    if nproc < 1:
        raise PlanError(f"nproc is {nproc}; at least one process is needed.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        local_addr="localhost",
    )
    try:
        elastic_launch(config, sys.executable)("-u", *script_args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(
            f"Rank {rank} failed with exit code {failure.exitcode}; the other ranks were stopped.",
            file=sys.stderr,
        )
        return failure.exitcode if failure.exitcode > 0 else 1
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0
