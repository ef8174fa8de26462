"""A checkpoint written again as another mesh would have written it."""

from __future__ import annotations

import json

import torch

from msc.checkpoint.files import HISTORY, PLAN
from msc.checkpoint.place import Place
from msc.checkpoint.program_state import state_tensors
from msc.ir.errors import UserError
from msc.program import Program
from msc.runtime.checkpoint import catalog
from msc.runtime.checkpoint.committing import Committer
from msc.runtime.checkpoint.dcp import METADATA, dcp_metadata
from msc.runtime.checkpoint.image import Image
from msc.runtime.checkpoint.manifest import folder_name
from msc.runtime.checkpoint.reading import check_same_model
from msc.runtime.checkpoint.states import written_by
from msc.runtime.checkpoint.storage import open_storage
from msc.runtime.checkpoint.writer import PartWriter


def reshard(source: Place, target: str, program: Program) -> Place:
    """Write a checkpoint as the ranks of `program`'s mesh would have written it.

    Raises `UserError` if it is of another model or damaged, or `target` has a checkpoint of that
    step.
    """
    state = source.open()
    commit = state.commit
    storage = open_storage(target)
    if any(each.step == commit.step and each.complete for each in catalog.checkpoints(storage)):
        raise UserError(f"{target} has a complete checkpoint of step {commit.step} already.")
    wanted = state_tensors(program)
    check_same_model(state.descriptions, wanted)
    mesh = program.mesh
    images = [Image(written_by(wanted.tensors, mesh, rank)) for rank in range(mesh.size)]
    for rank, image in enumerate(images):
        memory = torch.zeros(image.size, dtype=torch.uint8)
        image.frames_into(memory)
        for place in image.places:
            place.elements(memory).copy_(state.box(place.tensor.name, place.piece.box))
        writer = PartWriter(storage, rank, commit.attempt, tuple(image.stored()), image.size)
        writer.write(commit.step, memoryview(memory.numpy()))  # type: ignore[arg-type]
    files = {
        PLAN: json.dumps(program.plan.to_json()).encode(),
        METADATA: dcp_metadata([image.stored() for image in images]),
    }
    facts = {
        **commit.state,
        "mesh": [list(axis) for axis in mesh],
        "micro_batches": program.micro_batches,
        "program": program.fingerprint,
    }
    committer = Committer(
        storage, mesh.size, commit.attempt, files, None, (), lambda event, **facts: None, 0.0
    )
    committer.expect(commit.step, facts, {HISTORY: state.file(HISTORY).decode()})
    committer.poll()
    return Place(storage, folder_name(commit.step, commit.attempt))
