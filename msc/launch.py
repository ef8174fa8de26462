"""Start a script's ranks on this machine or several, and bring the run back when ranks fail."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from msc.ir.dump import make_folder
from msc.ir.errors import InputError, PlanError
from msc.ir.torch_private import LATE_IMPORTS
from msc.monitor import address
from msc.ranks import under_torchrun
from msc.runtime.recovery.budget import Budget
from msc.runtime.recovery.cluster_node import ClusterNode, Meeting
from msc.runtime.recovery.controller_process import Settings
from msc.runtime.recovery.environment import Layout
from msc.runtime.recovery.one_node import run_alone

__all__ = ["launch", "under_torchrun"]

_AHEAD = ("msc.compiler", "msc.trainer", "msc.launch", *LATE_IMPORTS)
"""What a standby imports before it is needed."""


def launch(
    script_args: Sequence[str],
    nproc: int,
    *,
    standbys: int = 0,
    replacements: int = 0,
    restarts: int = 0,
    min_ranks: int | None = None,
    run: str | Path | None = None,
    nnodes: int = 1,
    rdzv: str | None = None,
    rdzv_id: str = "msc",
    node_rank: int | None = None,
    spares: int = 0,
    join_timeout: float = 600.0,
    copies: bool = True,
) -> int:
    """Run `python *script_args` in `nproc` processes as ranks 0 to nproc-1; returns the exit code.

    `script_args` are a script and its arguments, such as `sys.argv`. Output goes where this
    process's goes. When a rank fails the others are stopped, and its exit code is returned; when
    this process is asked to stop, the ranks are stopped too. Each rank gets one thread unless
    OMP_NUM_THREADS says otherwise. Use it as

        if not under_torchrun():
            sys.exit(launch(sys.argv, mesh.size))

    Args:
        script_args: the script and its arguments.
        nproc: how many ranks.
        standbys: processes that have MSC imported and wait to take a rank.
        replacements: how many ranks may be replaced. The others keep their processes, if they are
            inside of their first `Trainer.fit`, and all go back to the newest step that they all
            have. A new process runs the script from its beginning, so how many steps it fits must
            depend on `trainer.step`, as with checkpoints.
        restarts: how often all ranks may be started anew, from storage, where that is of no use.
        min_ranks: the fewest ranks on which the run may go on when one cannot be replaced; None:
            on no fewer than it was started for. Needs a program with `dp=*`. The run grows back to
            all of them when processes on the lost slots run again, which is tried now and then.
        run: a folder for what happens (events.jsonl) and for `msc blame`; None: one that is gone
            at the end.
        nnodes: on how many nodes, each of which calls this with equal arguments, but for
            `node_rank` and `run`. Rank r is on node r // nproc. All ranks of a lost node count as
            one replacement.
        rdzv: "host:port" of the node that has the run's controller, as all nodes reach it; that is
            the one with node_rank 0, or without node ranks the one whose address it is.
        rdzv_id: name of the run, the same on all nodes. Together with MSC_RUN_TOKEN, a secret in
            the environment of all nodes, it keeps others out.
        node_rank: the node's number; None: as they come. From `nnodes` on it is a spare.
        spares: how many nodes more may wait to take the place of a lost one.
        join_timeout: seconds that nodes are waited for, at the beginning and when one was lost.
        copies: whether each node keeps, in host memory, copies of the snapshots of the node before
            it. They take as much memory as its own snapshots.
    """
    if under_torchrun():
        raise PlanError("This process is a rank already; only the process above starts ranks.")
    if nproc < 1:
        raise PlanError(f"nproc is {nproc}; at least one process is needed.")
    counts = {"standbys": standbys, "replacements": replacements, "restarts": restarts}
    for name, count in counts.items():
        if count < 0:
            raise InputError(f"{name} is {count}; it is a count, 0 or more.")
    _check_nodes(nnodes, rdzv, node_rank, spares, join_timeout)
    ranks = nnodes * nproc
    if min_ranks is not None and not 1 <= min_ranks <= ranks:
        raise InputError(f"min_ranks is {min_ranks}; it is from 1 to {ranks}, the number of ranks.")
    if standbys and not replacements + restarts:
        raise InputError(f"{standbys} standbys without replacements or restarts have no use.")
    if not script_args or not Path(script_args[0]).is_file():
        raise InputError(f"There is no script {' '.join(script_args[:1]) or 'to run'}.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with _folder(run) as folder:
        budget = Budget(replacements, restarts, min_ranks)
        if rdzv is None:
            return run_alone(
                script_args, nproc, folder, standbys=standbys, budget=budget, modules=_AHEAD
            )
        place = address(rdzv)
        layout = Layout(nproc, nnodes, rdzv_id, restarts)
        settings = Settings(
            layout, place[0], budget, str(folder), spares, join_timeout, copies, os.getpid()
        )
        meeting = Meeting(place, node_rank)
        return ClusterNode(meeting, settings, script_args, standbys=standbys, modules=_AHEAD).run()


def _check_nodes(
    nnodes: int, rdzv: str | None, node_rank: int | None, spares: int, join_timeout: float
) -> None:
    if nnodes < 1:
        raise InputError(f"nnodes is {nnodes}; at least one node is needed.")
    if spares < 0:
        raise InputError(f"spares is {spares}; it is a count, 0 or more.")
    if node_rank is not None and not 0 <= node_rank < nnodes + spares:
        raise InputError(
            f"node_rank is {node_rank}; with {nnodes} nodes and {spares} spares it is 0 to "
            f"{nnodes + spares - 1}."
        )
    if not join_timeout > 0:
        raise InputError(f"join_timeout is {join_timeout}; it is a positive number of seconds.")
    if rdzv is None and (nnodes > 1 or spares or node_rank is not None):
        raise InputError(
            "A run on several nodes needs an address at which they meet: --rdzv HOST:PORT, the "
            "same on all nodes, where HOST is one of them."
        )


@contextlib.contextmanager
def _folder(run: str | Path | None) -> Iterator[Path]:
    if run is not None:
        make_folder(Path(run))
        yield Path(run).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="msc-run-", ignore_cleanup_errors=True) as made:
        yield Path(made)
