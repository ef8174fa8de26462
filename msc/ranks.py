"""This process as one rank of a job: joining it, agreeing on the program, saying who is missing."""

from __future__ import annotations

import atexit
import itertools
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from msc.ir.errors import CommunicationError, LostRankError, PlanError
from msc.ir.mesh import Mesh
from msc.ir.torch_private import HashStore, PrefixStore, Store, TCPStore, default_store
from msc.runtime.recovery.link import Generation, current
from msc.runtime.recovery.sockets import forget, recording

_GRACE_S = 5.0  # how long a rank waits for the reports of others before it names who is silent
_GLOO = re.compile(r"gloo|Timed out waiting|Connection (closed|reset) by peer")
_numbers = itertools.count()  # of jobs in this group, which all ranks join in one order
_groups = itertools.count()  # of process groups made here
_owners = 0  # jobs in this process that use the process group which `join` has made
_made_here = False


def under_torchrun() -> bool:
    """Whether a launcher has given this process a rank in its environment."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def world_size() -> int:
    """How many ranks the job has: those of its process group or launcher, or this process alone."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else 1


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception says that another rank did not answer."""
    if isinstance(error, (dist.DistError, LostRankError)):
        return True
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None


@dataclass
class Job:
    """A rank of a running job. `store` holds what ranks tell each other beside tensors.

    generation: how often the ranks have met, if an agent lets them meet again after a fault.
    """

    mesh: Mesh
    rank: int
    device: torch.device
    store: Store
    timeout: timedelta
    generation: Generation | None = None
    open: bool = True

    def __str__(self) -> str:
        place = ",".join(f"{axis}={i}" for axis, i in self.mesh.coordinate(self.rank).items())
        name = f"Rank {self.rank} ({place})" if place else f"Rank {self.rank}"
        return name if self.generation is None else f"{name}, generation {self.generation.number}"

    def agree(self, facts: Mapping[str, str]) -> None:
        """Compare `facts` (what -> value) on all ranks; collective.

        Raises `CommunicationError` on every rank that names the ranks whose facts are not rank 0's.
        """
        self.store.set(f"facts/{self.rank}", json.dumps(dict(facts)))
        if self.rank == 0:
            self.store.set("verdict", self._compare(facts))
        verdict = self._get("verdict")
        if verdict:
            raise CommunicationError(verdict)

    def _compare(self, facts: Mapping[str, str]) -> str:
        different: dict[str, dict[str, list[int]]] = {name: {} for name in facts}
        try:
            told = self._get_all([f"facts/{rank}" for rank in range(1, self.mesh.size)])
        except CommunicationError as error:
            return str(error)
        for rank, text in enumerate(told, 1):
            theirs = json.loads(text)
            for name, value in facts.items():
                if theirs.get(name) != value:
                    different[name].setdefault(str(theirs.get(name)), []).append(rank)
        lines = [
            f"The {name} of {_ranks(ranks)} differs from that of rank 0: {value or 'none'} instead "
            f"of {facts[name] or 'none'}."
            for name, found in different.items()
            for value, ranks in found.items()
        ]
        if not lines:
            return ""
        return "\n".join(
            [
                *lines,
                "Every rank must compile the same model with the same options, seed and initial "
                "values (torch.manual_seed before building the model), or load one saved program.",
            ]
        )

    def _get(self, key: str, patience: timedelta | None = None) -> str:
        try:
            self.store.wait([key], self.timeout if patience is None else patience)
            return bytes(self.store.get(key)).decode()
        except dist.DistError as error:
            raise LostRankError(
                f"{self}: '{key}' did not come from its rank within "
                f"{self.timeout.total_seconds():g} s while the job was starting. That rank has "
                "ended, hangs, or never started."
            ) from error

    def _get_all(self, keys: list[str]) -> list[str]:
        """As `_get`, of all keys in two round trips; the error names the first that is missing."""
        if not keys:
            return []
        try:
            self.store.wait(keys, self.timeout)
        except dist.DistError:
            for key in keys:
                if not self.store.check([key]):
                    self._get(key, timedelta(0))
        return [bytes(value).decode() for value in self.store.multi_get(keys)]

    def report(self, step: int, error: BaseException) -> None:
        """Tell the other ranks that this one stops in `step`."""
        text = str(error).partition("\n")[0]
        lost = is_lost_peer(error)
        entry = {"step": step, "lost": lost, "error": f"{type(error).__name__}: {text}"}
        try:
            self.store.set(f"stopped/{self.rank}", json.dumps(entry))
        except dist.DistError:
            return  # the store went with the rank that held it; nobody is left to tell

    def explain(self, step: int, error: BaseException) -> CommunicationError:
        """Who is missing, after this rank has lost a peer in `step`."""
        lines = [
            f"{self} got no answer from another rank in step {step}: "
            f"{str(error).strip().splitlines()[-1]}"
        ]
        try:
            lines += self._others()
        except dist.DistError:
            lines.append("  What the other ranks do is unknown: the rendezvous store is gone.")
        return CommunicationError("\n".join(lines))

    def _others(self) -> list[str]:
        missing = [rank for rank in range(self.mesh.size) if rank != self.rank]
        end = time.monotonic() + min(_GRACE_S, self.timeout.total_seconds())
        lines = []
        while missing:
            for rank in [r for r in missing if self.store.check([f"stopped/{r}"])]:
                entry: dict[str, Any] = json.loads(self.store.get(f"stopped/{rank}"))
                missing.remove(rank)
                if not entry["lost"]:
                    lines.append(f"  rank {rank} failed in step {entry['step']}: {entry['error']}")
            if not missing or time.monotonic() > end:
                break
            time.sleep(0.05)
        if missing:
            verb = "reports" if len(missing) == 1 else "report"
            lines.append(f"  {_ranks(missing)} {verb} nothing: hanging, much slower, or dead.")
        return lines

    def close(self) -> None:
        """Leave the job; the last to leave destroys the process group, if MSC has made it."""
        global _owners, _made_here
        if not self.open:
            return
        self.open = False
        _owners -= 1
        if _owners == 0 and _made_here and dist.is_initialized():
            _made_here = False
            dist.destroy_process_group()
            forget()


def has_group_alone() -> bool:
    """Whether the process group was made by `join`, for one job."""
    return _made_here and _owners == 1


def join(mesh: Mesh, device: str | None, timeout: timedelta, trainer: int = 1) -> Job:
    """Make this process the rank of `mesh` that its launcher says, or that torch.distributed says.

    Initializes torch.distributed if nobody has: gloo on CPU, NCCL on CUDA. A mesh of one rank needs
    no launcher. `device`: "cpu" or "cuda"; None takes CUDA where there is one. `trainer`: which one
    of the process this is for.

    Raises `PlanError` unless there are as many processes as the mesh has ranks.
    """
    global _owners, _made_here, _numbers
    _check_size(mesh)
    place = _device(device)
    generation = None
    if not dist.is_initialized():
        _made_here = True
        _numbers = itertools.count()
        generation = _initialize(mesh, place, timeout, trainer)
    _owners += 1
    store = PrefixStore(f"msc/{next(_numbers)}", default_store())
    job = Job(mesh, dist.get_rank(), place, store, timeout, generation)
    atexit.register(job.close)
    return job


def _check_size(mesh: Mesh) -> None:
    world = world_size()
    if world == mesh.size:
        return
    if world == 1 and not (dist.is_initialized() or under_torchrun()):
        raise PlanError(
            f"Mesh {mesh} needs {mesh.size} processes, and this one was started alone. Start the "
            f"script with: torchrun --nproc-per-node {mesh.size} script.py, or let the script "
            f"start them: msc.launch.launch(sys.argv, {mesh.size})."
        )
    raise PlanError(
        f"Mesh {mesh} has {mesh.size} ranks, but {world} processes were started. Start "
        f"{mesh.size} processes, or compile for a mesh of {world} ranks; msc.compile(.., "
        "mesh='dp=*') in the script compiles for as many as there are."
    )


def _device(device: str | None) -> torch.device:
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if kind != "cuda" or local >= torch.cuda.device_count():
        raise PlanError(
            f"device is '{kind}' and the local rank {local}, but this machine has "
            f"{torch.cuda.device_count()} CUDA devices. Start fewer ranks here, or pass "
            "device='cpu'."
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _initialize(
    mesh: Mesh, device: torch.device, timeout: timedelta, trainer: int
) -> Generation | None:
    """Make the default group; the generation that it is of, if there is an agent."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    link = current()
    generation = link.meet(trainer=trainer) if link is not None else None
    store: Store
    with recording():
        if generation is not None:
            rank, world = int(os.environ["RANK"]), mesh.size
            server = TCPStore(generation.host, generation.port, None, False, timeout)
            store = PrefixStore(f"generation-{generation.number}", server)
        elif under_torchrun():
            shared, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
            # The launcher's store still holds what the ranks wrote before a restart, and what an
            # earlier group of this process wrote.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = PrefixStore(f"msc-attempt-{attempt}-{next(_groups)}", shared)
        else:
            store, rank, world = HashStore(), 0, 1
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return generation


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" if len(ranks) <= 8 else f"ranks {shown} and {len(ranks) - 8} more"
