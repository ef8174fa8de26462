"""The `.metadata` of torch.distributed.checkpoint, so that its reader finds what MSC has written.

MSC writes it and never reads it: it is a pickle.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from msc.ir.torch_private import dcp_storage_info
from msc.runtime.checkpoint.manifest import StoredTensor, data_name

METADATA = ".metadata"


def dcp_metadata(parts: Sequence[Sequence[StoredTensor]]) -> bytes:
    """The metadata of a checkpoint from what each rank's data file holds.

    `model.h.0.weight` stands in a state dict as `{"model": {"h.0.weight": ..}}`, and
    `optimizer.first_moment.h.0.weight` two levels deep.
    """
    # takes a third of a second to import, and one rank of a run needs it
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, Any] = {}
    for rank, part in enumerate(parts):
        for tensor in part:
            entry = tensors.setdefault(
                tensor.name,
                TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, tensor.dtype)),
                    torch.Size(tensor.shape),
                    [],
                ),
            )
            for piece in tensor.pieces:
                offsets = torch.Size(piece.offsets)
                index = MetadataIndex(tensor.name, offsets, len(entry.chunks))
                entry.chunks.append(ChunkStorageMetadata(offsets, torch.Size(piece.lengths)))
                storage[index] = dcp_storage_info(data_name(rank), piece.start, piece.length)
    levels = {"model": 1, "optimizer": 2, "buffer": 1}
    paths = {n: tuple(n.split(".", levels[n.partition(".")[0]])) for n in tensors}
    return pickle.dumps(Metadata(dict(tensors), planner_data=paths, storage_data=storage))
