"""How a `Trainer` saves and resumes: this rank's side of `msc.Checkpoint`."""

from __future__ import annotations

import base64
import errno
import json
import queue
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from msc.batches import Batches
from msc.checkpoint.candidates import Candidates
from msc.checkpoint.files import HISTORY, PLAN
from msc.checkpoint.options import Checkpoint
from msc.checkpoint.program_state import state_tensors
from msc.ir.errors import UserError
from msc.ir.mesh import Mesh
from msc.program import Program
from msc.ranks import Job
from msc.runtime.checkpoint.absence import Absence
from msc.runtime.checkpoint.arena import Arena
from msc.runtime.checkpoint.dcp import METADATA, dcp_metadata
from msc.runtime.checkpoint.image import Image
from msc.runtime.checkpoint.loading import Broadcast, Loader, LoadReport
from msc.runtime.checkpoint.manifest import (
    Commit,
    commit_from_bytes,
    part_from_bytes,
    part_name,
    tensor_to_data,
)
from msc.runtime.checkpoint.marks import Mark, read_marks
from msc.runtime.checkpoint.reading import ReadPlan
from msc.runtime.checkpoint.same_mesh import SameMesh
from msc.runtime.checkpoint.snapshot import Snapshots
from msc.runtime.checkpoint.states import written_by
from msc.runtime.checkpoint.storage import open_storage
from msc.runtime.checkpoint.writer_process import WriterProcess
from msc.runtime.recovery.images import DamagedError, Images, joined
from msc.runtime.recovery.link import Link, MemorySource
from msc.runtime.state import RankState

_NEVER_WRITABLE = {
    *(errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
}
_GRACE_S = 1.0  # for a process that has nothing to write to end, after an error


@dataclass
class History:
    """What a run tells of its steps so far; `msc.Trainer` says what each list is."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    learning_rates: list[float] = field(default_factory=list)

    def become(self, other: History) -> None:
        """Take over what another one tells; the lists stay the same objects."""
        self.losses[:] = other.losses
        self.grad_norms[:] = other.grad_norms
        self.learning_rates[:] = other.learning_rates

    def cut(self, steps: int) -> None:
        """Forget all but the first so many steps."""
        for values in (self.losses, self.grad_norms, self.learning_rates):
            del values[steps:]

    def to_json(self) -> str:
        """As text; numbers come back bit for bit."""
        return json.dumps(self.__dict__)


class RunCheckpoints:
    """Saves one rank's state, with all other ranks, and restores it.

    messages: lines for the user, from all threads; report: of the load, after `resume`.
    """

    def __init__(
        self,
        options: Checkpoint,
        program: Program,
        job: Job,
        seed: int,
        batches: Batches,
        link: Link | None = None,
    ) -> None:
        batches.position()  # refused now rather than at the first save
        self.messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.report = LoadReport()
        self._options = options
        self._program = program
        self._job = job
        self._seed = seed
        self._batches = batches
        self._storage = open_storage(options.url)
        self._check_folder()
        self._states = state_tensors(program)
        self._image = Image(written_by(self._states.tensors, program.mesh, job.rank))
        self._arena = Arena(self._image.size, job.device)
        for slot in self._arena.slots:
            self._image.frames_into(slot)
        if link is not None:
            link.tell("arena", [self._arena.handle], marks=self._arena.marks_start)
        self._snapshots = Snapshots(job.device)
        self._writer: WriterProcess | None = None
        self._verified: list[str] = []
        self._kept: int | None = None
        self._saved = -1
        self._last_save = time.monotonic()
        self._asked = -1

    def _check_folder(self) -> None:
        """Refuse now what no save could be written into."""
        try:
            self._storage.make_folder("")
        except OSError as error:
            if error.errno in _NEVER_WRITABLE:
                raise UserError(
                    f"Checkpoints cannot be saved in {self._storage}: {error}. Give msc.Checkpoint "
                    "a folder that can be made and written."
                ) from error

    # -- resuming

    def meet(self, job: Job) -> None:
        """The ranks have met again, as `job`; a state must be resumed or restored next."""
        self._job = job
        self._saved = self._asked = -1
        self._kept = None

    def restore(self, state: RankState, source: MemorySource) -> None:
        """Go to a step that there is of all ranks in host memory; not collective.

        Raises `LostRankError` if a rank's copy of it is damaged, which is not offered again.
        """
        rank, target = self._job.rank, self._empty_target(state)
        needed = SameMesh(self._states, rank, target)
        with Images(source) as memory:
            try:
                own, note = memory.get(rank, needed.sizes[rank])
            except DamagedError as error:
                self._tell(f"{error} and not used")
                raise
            images = {
                writer: memory.get(writer, size, joined(needed.ranges(writer)))[0]
                for writer, size in needed.sizes.items()
                if writer != rank
            }
        needed.fill(target, images | {rank: own})
        facts = json.loads(note)
        self._put(state, target, source.step, facts["skipped"], facts["data"])
        marks = read_marks(self._arena.handle, self._arena.marks_start)
        if source.mark in marks:
            self._kept = marks.index(source.mark)
            return
        # This process has taken the rank: others need its snapshot as much as their own.
        self._kept = 0
        self._arena.slots[0].copy_(own)
        self._arena.marks.note(0, note)
        self._arena.complete(0, source.mark)

    def _empty_target(self, state: RankState) -> dict[str, Tensor]:
        parts = {tensor.name: tensor.of(state) for tensor in self._states.tensors}
        return {
            name: torch.zeros(part.shape, dtype=part.dtype)
            for name, part in parts.items()
            if part is not None
        }

    def _put(
        self, state: RankState, found: Mapping[str, Tensor], step: int, skipped: int, data: Any
    ) -> None:
        for tensor in self._states.tensors:
            if tensor.name in found:
                tensor.put(state, found[tensor.name].to(self._job.device))
        state.step = step
        state.skipped = torch.tensor(skipped, dtype=torch.int64)
        self._batches.seek(step, data)

    def resume(self, state: RankState) -> History | None:
        """Restore the newest complete checkpoint that is intact; None if there is none at all.

        Collective. Raises `UserError` if none of the complete ones is intact, or the newest is of
        another model, seed or data.
        """
        candidates = Candidates(self._storage, self._tell) if self._job.rank == 0 else None
        while True:
            offer = json.loads(
                self._share(candidates.offer() if candidates is not None else b"", 0)
            )
            if "error" in offer:
                raise UserError(offer["error"])
            if not offer:
                return None
            history = self._load(offer, state)
            if history is not None:
                return history
            if candidates is not None:
                candidates.refuse(self.report.damage)

    def _load(self, offer: Mapping[str, Any], state: RankState) -> History | None:
        commit = commit_from_bytes(offer["commit"].encode())
        parts = [
            part_from_bytes(text.encode(), part_name(rank))
            for rank, text in enumerate(offer["parts"])
        ]
        self._check_seed(commit)
        plan = ReadPlan(parts, self._states)
        folder, job = offer["folder"], self._job
        target = self._empty_target(state)
        broadcast = Broadcast(job.device, job.timeout)
        try:
            self.report = Loader(self._storage, folder, plan, job.rank, broadcast).load(target)
        finally:
            broadcast.close()
        self.report.damage = self._agree_on(self.report.damage)
        if self.report.damage:
            return None
        self._put(state, target, commit.step, commit.state["skipped"], commit.state["data"])
        self._verified = [folder]
        self._saved = commit.step
        mesh = Mesh(tuple((name, size) for name, size in commit.state["mesh"]))
        moved = (
            "" if mesh == self._program.mesh else f", saved on mesh {str(mesh) or 'of one rank'}"
        )
        self._tell(f"resumed from step {commit.step}, {self._storage}/{folder}{moved}")
        return History(**json.loads(offer["history"]))

    def _check_seed(self, commit: Commit) -> None:
        if commit.state["seed"] != self._seed:
            raise UserError(
                f"The seed is {self._seed}, and {self._storage} has a run with seed "
                f"{commit.state['seed']}. Pass seed={commit.state['seed']} to go on with it, or "
                "save into another folder."
            )

    def _share(self, data: bytes, source: int) -> bytes:
        """`data` of rank `source`, on every rank."""
        device = self._job.device
        length = torch.tensor(len(data), device=device)
        dist.broadcast(length, source)
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        if self._job.rank != source:
            raw = torch.empty(int(length), dtype=torch.uint8)
        moved = raw.to(device, torch.uint8)
        dist.broadcast(moved, source)
        return moved.cpu().numpy().tobytes()

    def _agree_on(self, damage: str) -> str:
        """What one of the ranks has found, on every rank; "" if none has found anything."""
        finder = torch.tensor(self._job.rank + 1 if damage else 0, device=self._job.device)
        dist.all_reduce(finder, dist.ReduceOp.MAX)
        if not finder:
            return ""
        source = int(finder) - 1
        return self._share(damage.encode(), source).decode()

    # -- saving

    def start(self) -> None:
        """Let saves go into folders of their own; collective.

        Starts the writing process if it does not run. Raises `CommunicationError` if it cannot
        start.
        """
        job = self._job
        if job.rank == 0:
            job.store.set("checkpoint", uuid.uuid4().hex[:8])
            job.store.set("save after", "-1")
        job.store.wait(["checkpoint"], job.timeout)
        attempt = bytes(job.store.get("checkpoint")).decode()
        if self._writer is not None:
            self._writer.begin(attempt)
        else:
            self._writer = self._new_writer(attempt)
        if self._kept is not None:
            self._writer.keep(self._kept)

    def _new_writer(self, attempt: str) -> WriterProcess:
        job = self._job
        files = {}
        if job.rank == 0:
            files[PLAN] = json.dumps(self._program.plan.to_json()).encode()
            files[METADATA] = dcp_metadata(
                [
                    Image(written_by(self._states.tensors, self._program.mesh, rank)).stored()
                    for rank in range(self._program.mesh.size)
                ]
            )
        plan = {
            "url": self._storage.url,
            "rank": job.rank,
            "world": self._program.mesh.size,
            "attempt": attempt,
            "tensors": tensor_to_data(self._image.stored()),
            "files": {name: base64.b64encode(data).decode() for name, data in files.items()},
            "keep": self._options.keep,
            "verified": self._verified,
        }
        absence = Absence(self._storage, job.rank)
        # The first must start; one that takes its place after a fault holds up nobody meanwhile.
        first = self._kept is None
        return WriterProcess(self._arena, plan, job.rank == 0, self._tell, absence.say, wait=first)

    @property
    def writer(self) -> WriterProcess:
        """The process that writes."""
        assert self._writer is not None
        return self._writer

    def before_update(self) -> None:
        """Parameters and moments are about to be written: the copy of them must be done."""
        self._snapshots.settle()

    def after_step(
        self, state: RankState, history: History, check: Callable[[RankState], None]
    ) -> None:
        """Save if it is time to, after `check` has seen the state; on every rank alike."""
        if self._is_due(state.step):
            check(state)
            self.save(state, history, wait=self._options.when_busy == "wait")

    def _is_due(self, step: int) -> bool:
        every = self._options.every
        if isinstance(every, int):
            return step % every == 0
        # Rank 0 asks for a save one step ahead. The loss of a step comes from all ranks, so no rank
        # ends that step before rank 0 has begun it, and the request is there by then.
        due = int(self._job.store.get("save after")) == step
        if self._job.rank == 0 and self._asked <= step:
            if time.monotonic() - self._last_save >= every.total_seconds():
                self._last_save = time.monotonic()
                self._asked = step + 1
                self._job.store.set("save after", str(step + 1))
        return due

    def save(self, state: RankState, history: History, wait: bool) -> None:
        """Copy the state while the next step begins, and have the copy written."""
        step = state.step
        if step == self._saved and self.writer.failed != step:
            return
        self._snapshots.finish()
        slot = self.writer.take_slot(wait)
        if slot is None:
            why = "it cannot be started" if self.writer.broken else "both copies are being written"
            self._tell(f"checkpoint of step {step} is skipped: {why}")
            self.writer.skip(step)
            return
        self._saved = step
        request: dict[str, Any] = {"state": {}, "files": {}}
        if self._job.rank == 0:
            request = {"state": self._facts(state), "files": {HISTORY: history.to_json()}}
        values = []
        for place in self._image.places:
            part = place.tensor.of(state)
            assert part is not None, place.tensor.name
            values.append(place.piece.of(part.contiguous()))  # a buffer may be a view
        memory = self._arena.slots[slot]
        slots = [place.elements(memory) for place in self._image.places]
        mark = self._note(state, slot)

        def copied() -> None:
            if mark is not None:
                self._arena.complete(slot, mark)
            self.writer.save(step, slot, request)

        self._snapshots.begin(values, slots, copied)

    def save_whole(self, state: RankState, history: History) -> bool:
        """Save this step and wait until it is complete; whether it is. Collective."""
        self.save(state, history, wait=True)
        self.flush()
        complete = self._job.rank == 0 and self.writer.committed == state.step
        return bool(self._share(b"complete" if complete else b"", 0))

    def _note(self, state: RankState, slot: int) -> Mark | None:
        """Put what is no tensor beside the slot; its mark once it is complete."""
        marks, generation = self._arena.marks, self._job.generation
        marks.clear(slot)
        if generation is None:
            return None
        facts = {"skipped": int(state.skipped), "data": self._batches.position()}
        if not marks.note(slot, json.dumps(facts)):
            if self._job.rank == 0:  # it is the same on all
                self._tell(
                    f"the state_dict() of the data is too long to be kept in memory beside step "
                    f"{state.step}: after a fault the run goes on from storage"
                )
            return None
        return Mark(generation.number, state.step)

    def settle(self) -> None:
        """Wait until the copy that is under way is complete."""
        self._snapshots.finish()

    def _facts(self, state: RankState) -> dict[str, Any]:
        program = self._program
        return {
            "seed": self._seed,
            "skipped": int(state.skipped),
            "data": self._batches.position(),
            "mesh": [list(axis) for axis in program.mesh],
            "micro_batches": program.micro_batches,
            "program": program.fingerprint,
            "aliases": {n: list(p.aliases) for n, p in program.parameters.items() if p.aliases},
        }

    def flush(self) -> None:
        """Wait until all saves of this rank are durable, and on rank 0 complete."""
        self._snapshots.finish()
        self.writer.flush()

    def close(self, finish: bool) -> None:
        """End the writing process, which finishes what it has; wait for that if `finish`."""
        self._snapshots.close()
        if self._writer is not None:
            self._writer.close(self._job.timeout.total_seconds() if finish else _GRACE_S)

    def _tell(self, text: str) -> None:
        self.messages.put(text)
