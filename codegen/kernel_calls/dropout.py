"""`msc.dropout`, forward and backward: bit for bit what the op gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from msc.codegen.kernel_calls.call import Launches, Plan, dense, name_of
from msc.codegen.kernels import dropout as kernels
from msc.codegen.kernels.description import Target
from msc.codegen.kernels.dropout import Dropout
from msc.ir.errors import PlanError
from msc.ir.ops.random import flat_indices


def dropout(
    target: Target,
    x: Tensor,
    p: float,
    key: Tensor,
    coordinates: Sequence[Tensor | None],
    shape: Sequence[int],
) -> Plan:
    """Each element's bit follows from the key and from its place in the whole tensor."""
    if not x.numel() or not x.dim():
        raise PlanError("dropout: the kernel takes rows, and there are none")
    width = x.shape[-1]
    size = (math.prod(x.shape[:-1]), width, p, name_of(x.dtype), target)
    kernel = kernels.emit(Dropout(*size, whole_rows=coordinates[-1] is None))

    def run(
        x: Tensor,
        p: float,
        key: Tensor,
        coordinates: Sequence[Tensor | None],
        shape: Sequence[int],
    ) -> tuple[Launches, Tensor]:
        y = x.new_empty(x.shape)
        row_places, column_places = flat_indices(coordinates, shape, x.device)
        values: dict[str, Any] = {"x": dense(x), "row_places": dense(row_places), "y": y}
        values["key"] = key.to(x.device).view(1)
        if coordinates[-1] is not None:
            values["column_places"] = dense(column_places)
        return [(kernel, values)], y

    return Plan((kernel,), run)
