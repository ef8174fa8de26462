"""Start the ranks of a script on this machine, and bring the run back when ranks fail."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from msc.ir.dump import make_folder
from msc.ir.errors import InputError, PlanError
from msc.ir.torch_private import LATE_IMPORTS
from msc.ranks import under_torchrun
from msc.runtime.recovery.agent import run_alone
from msc.runtime.recovery.controller import Budget

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
            on no fewer than `nproc`. Needs a program with `dp=*`. The run grows back to all of them
            when processes on the lost slots run again, which is tried now and then.
        run: a folder for what happens (events.jsonl) and for `msc blame`; None: one that is gone
            at the end.
    """
    if under_torchrun():
        raise PlanError("This process is a rank already; only the process above starts ranks.")
    if nproc < 1:
        raise PlanError(f"nproc is {nproc}; at least one process is needed.")
    counts = {"standbys": standbys, "replacements": replacements, "restarts": restarts}
    for name, count in counts.items():
        if count < 0:
            raise InputError(f"{name} is {count}; it is a count, 0 or more.")
    if min_ranks is not None and not 1 <= min_ranks <= nproc:
        raise InputError(f"min_ranks is {min_ranks}; it is from 1 to {nproc}, the number of ranks.")
    if standbys and not replacements + restarts:
        raise InputError(f"{standbys} standbys without replacements or restarts have no use.")
    if not script_args or not Path(script_args[0]).is_file():
        raise InputError(f"There is no script {' '.join(script_args[:1]) or 'to run'}.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with _folder(run) as folder:
        budget = Budget(replacements, restarts, min_ranks)
        return run_alone(
            script_args, nproc, folder, standbys=standbys, budget=budget, modules=_AHEAD
        )


@contextlib.contextmanager
def _folder(run: str | Path | None) -> Iterator[Path]:
    if run is not None:
        make_folder(Path(run))
        yield Path(run).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="msc-run-", ignore_cleanup_errors=True) as made:
        yield Path(made)
