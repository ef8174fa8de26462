"""Saving beside the training loop: MSC and torch.distributed.checkpoint's `async_save`.

    python benchmarks/checkpoint.py                    # 1 GiB over 4 ranks; results/checkpoint.json
    python benchmarks/checkpoint.py --mib 256 --ranks 2 --saves 2

All modes save the same float32 tensors of 8 MiB, sharded on dim 0, in one run, beside a step that
sleeps (standing for the device) and computes for a millisecond. A copy can hide behind the first
four fifths of a step, before the "optimizer": a short step is shorter than the copy, a long one
longer. Per save, the slowest rank counts:

    stall      how long the training loop was stopped: the call, and the wait before the "optimizer"
    slowest    the slowest step while the save was being written, over the median of all steps
    durable    from the call until every rank could load it, files synchronized; within 5 ms
    raw        the same bytes written and synchronized by each rank, without anything else

`async_save` is tried with a thread and with a process, each with a stager that keeps its buffers
and stages in a thread of its own; the loop waits for staging where the optimizer would write, as
MSC does. "blocking" is a copy that the loop waits for: MSC's into its arena, DCP's by its stager.
Before each save comes a raw write into a new file: a file that is written again finds its pages.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that it also runs as `python benchmarks/checkpoint.py`

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.checkpoint import state_dict_saver  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.distributed.tensor import Shard as TorchShard  # noqa: E402
from torch.multiprocessing.spawn import spawn  # noqa: E402

from benchmarks.hardware import hardware  # noqa: E402
from msc.ir.layout import ParameterLayout  # noqa: E402
from msc.ir.mesh import Mesh  # noqa: E402
from msc.ir.placement import Shard  # noqa: E402
from msc.runtime.checkpoint.arena import Arena  # noqa: E402
from msc.runtime.checkpoint.image import Image  # noqa: E402
from msc.runtime.checkpoint.manifest import tensor_to_data  # noqa: E402
from msc.runtime.checkpoint.snapshot import Snapshots  # noqa: E402
from msc.runtime.checkpoint.states import StateTensor, written_by  # noqa: E402
from msc.runtime.checkpoint.writer_process import WriterProcess  # noqa: E402

RESULTS = Path(__file__).parent / "results"
ROWS, COLUMNS = 1024, 2048  # 8 MiB
POLL_S = 0.005
BEFORE_UPDATE = 0.8  # of the step, forward and backward
LIMIT_S = 300.0


class Candidate(ABC):
    """One way to save. `start` begins a save; `settle` returns when values may change."""

    @abstractmethod
    def start(self, number: int) -> None: ...

    @abstractmethod
    def settle(self) -> None: ...

    @abstractmethod
    def over(self) -> bool: ...

    @abstractmethod
    def close(self) -> None: ...


class Msc(Candidate):
    """MSC's two stages."""

    def __init__(self, shards: dict[str, Tensor], folder: Path) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = Mesh((("tp", world),))
        tensors = []
        for name in shards:
            layout = ParameterLayout(
                name, (ROWS, COLUMNS), torch.float32, True, shards={"tp": Shard(0)}
            )
            tensors.append(
                StateTensor(f"model.{name}", "parameter", name, layout.dtype, layout.shape, layout)
            )
        self._image = Image(written_by(tensors, mesh, rank))
        self._values = [p.piece.of(shards[p.tensor.held]) for p in self._image.places]
        self._arena = Arena(self._image.size, torch.device("cpu"))
        for slot in self._arena.slots:
            self._image.frames_into(slot)
        plan = {
            "url": str(folder),
            "rank": rank,
            "world": world,
            "attempt": "benchmark",
            "tensors": tensor_to_data(self._image.stored()),
            "files": {},
            "keep": None,
            "verified": [],
        }
        self._writer = WriterProcess(
            self._arena, plan, rank == 0, print, lambda attempt, step: None
        )
        self._snapshots = Snapshots(torch.device("cpu"))
        self._number = -1

    def start(self, number: int) -> None:
        self._number = number
        slot = self._writer.take_slot(wait=True)
        assert slot is not None
        memory = self._arena.slots[slot]
        elements = [place.elements(memory) for place in self._image.places]
        request: dict[str, Any] = {"state": {}, "files": {}}
        self._snapshots.begin(
            self._values, elements, lambda: self._writer.save(number, slot, request)
        )

    def settle(self) -> None:
        self._snapshots.settle()

    def over(self) -> bool:
        done = self._writer.committed if dist.get_rank() == 0 else self._writer.written
        return done == self._number

    def close(self) -> None:
        self._snapshots.close()
        self._writer.close(LIMIT_S)


class MscBlocking(Msc):
    """The loop waits for the copy at once."""

    def start(self, number: int) -> None:
        super().start(number)
        self._snapshots.settle()


class Dcp(Candidate):
    """`async_save`; `thread` stages in a thread, and else the call waits for staging."""

    def __init__(
        self, shards: dict[str, Tensor], folder: Path, kind: str, in_thread: bool = True
    ) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self._state = {
            name: DTensor.from_local(value, mesh, [TorchShard(0)]) for name, value in shards.items()
        }
        self._kind = state_dict_saver.AsyncCheckpointerType(kind)
        self._folder = folder
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=kind == "process",
                use_async_staging=in_thread,
                use_non_blocking_copy=False,
            )
        )
        self._group = dist.new_group(backend="gloo")
        self._staged: Any = None
        self._saved: Any = None

    def start(self, number: int) -> None:
        response = state_dict_saver.async_save(
            self._state,
            storage_writer=FileSystemWriter(self._folder / str(number), sync_files=True),
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        if isinstance(response, state_dict_saver.AsyncSaveResponse):
            self._staged, self._saved = response.staging_completion, response.upload_completion
        else:
            self._staged, self._saved = None, response

    def settle(self) -> None:
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def over(self) -> bool:
        done = bool(self._saved.done())
        if done:
            self._saved.result()
        return done

    def close(self) -> None:
        self._stager.close()


Make = Callable[[dict[str, Tensor], Path], Candidate]
MODES: dict[str, Make] = {
    "msc": Msc,
    "dcp thread": lambda shards, folder: Dcp(shards, folder, "thread"),
    "dcp process": lambda shards, folder: Dcp(shards, folder, "process"),
    "msc blocking": MscBlocking,
    "dcp blocking": lambda shards, folder: Dcp(shards, folder, "thread", in_thread=False),
}


def measure(
    candidate: Candidate, raw: Callable[[int], float], step_s: float, options: argparse.Namespace
) -> list[dict[str, float]]:
    """The saves of one candidate, the first of which makes buffers and is not counted."""
    results = []
    for number in range(options.saves + 1):
        raw_s = raw(number)
        steps: list[float] = []
        for _ in range(options.quiet):
            steps.append(_step(step_s, None)[0])
        dist.barrier()
        started = time.perf_counter()
        candidate.start(number)
        stall = time.perf_counter() - started
        writing: list[float] = []
        durable = 0.0
        while True:
            seconds, waited, over = _step(step_s, candidate)
            writing.append(seconds)
            stall += waited
            if over:
                durable = over - started
                break
            if time.perf_counter() - started > LIMIT_S:
                raise RuntimeError("a save did not end")
        found = torch.tensor([stall, max(writing), durable], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        stall, slowest, durable = found.tolist()
        median = statistics.median(steps)
        results.append(
            {
                "stall_s": stall,
                "slowest": slowest / median,
                "durable_s": durable,
                "raw_s": raw_s,
                "step_s": median,
            }
        )
    return results[1:]


def _step(step_s: float, candidate: Candidate | None) -> tuple[float, float, float]:
    """Seconds of a step, what it waited for the save, and when that was over, or 0."""
    started = time.perf_counter()
    over = _sleep(step_s * BEFORE_UPDATE, candidate)
    waiting = time.perf_counter()
    if candidate is not None:
        candidate.settle()
    waited = time.perf_counter() - waiting
    busy = time.perf_counter() + 0.001
    while time.perf_counter() < busy:
        pass
    later = _sleep(step_s * (1 - BEFORE_UPDATE), candidate)
    return time.perf_counter() - started, waited, over or later


def _sleep(seconds: float, candidate: Candidate | None) -> float:
    """Sleep; when the save was over meanwhile, or 0."""
    end = time.perf_counter() + seconds
    over = 0.0
    while (left := end - time.perf_counter()) > 0:
        if candidate is not None and not over and candidate.over():
            over = time.perf_counter()
        time.sleep(min(left, POLL_S))
    return over


def raw_write(shards: dict[str, Tensor], folder: Path, number: int) -> float:
    """Seconds in which all ranks write and synchronize their bytes."""
    dist.barrier()
    started = time.perf_counter()
    with open(folder / f"{number}.{dist.get_rank()}", "wb", buffering=0) as file:
        for value in shards.values():
            view = memoryview(value.numpy()).cast("B")  # type: ignore[arg-type]
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _worker(rank: int, ranks: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=10),
    )
    count = options.mib // 8
    shards = {f"w{n}": torch.randn(ROWS // ranks, COLUMNS) for n in range(count)}
    results: dict[str, Any] = {f"{ms:g} ms": {} for ms in options.step_ms}
    for ms, mode in itertools.product(options.step_ms, options.modes):
        place = Path(folder, f"{mode} {ms:g}".replace(" ", "-"))
        raw_folder = place / "raw"
        if rank == 0:
            raw_folder.mkdir(parents=True)
        dist.barrier()
        candidate = MODES[mode](shards, place)
        dist.barrier()
        raw = functools.partial(raw_write, shards, raw_folder)
        results[f"{ms:g} ms"][mode] = saves = measure(candidate, raw, ms / 1e3, options)
        candidate.close()
        dist.barrier()
        if rank == 0:
            shutil.rmtree(place)
            print(f"step {ms:4g} ms   {_line(mode, saves)}", flush=True)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _line(mode: str, saves: list[dict[str, float]]) -> str:
    stall, slowest, durable, raw = (
        statistics.median(save[key] for save in saves)
        for key in ("stall_s", "slowest", "durable_s", "raw_s")
    )
    ratio = statistics.median(save["durable_s"] / save["raw_s"] for save in saves)
    worst = max(save["slowest"] for save in saves)
    return (
        f"{mode:14} stall {1e3 * stall:7.1f} ms   slowest step {slowest:5.2f} ({worst:.2f})   "
        f"durable {durable:6.2f} s   raw {raw:6.2f} s   durable/raw {ratio:5.2f}"
    )


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=1024, help="of all ranks together")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[50, 200])
    parser.add_argument("--quiet", type=int, default=20, help="steps between saves")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--folder", type=Path, help="where to save; else a temporary folder")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    options = parser.parse_args()
    load = [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        arguments = (options.ranks, folder, options)
        spawn(_worker, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]
        results = json.loads(Path(folder, "results.json").read_text())
    load.append(os.getloadavg()[0])
    options.out.mkdir(parents=True, exist_ok=True)
    found = {
        "hardware": hardware(),
        "load_average": load,
        "mib": options.mib,
        "ranks": options.ranks,
        "steps": results,
    }
    (options.out / "checkpoint.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
