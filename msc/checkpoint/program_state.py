"""What a checkpoint holds of a program: its parameters, the optimizer's states, and buffers."""

from __future__ import annotations

from msc.program import Program
from msc.runtime.checkpoint.states import StateTensor, StateTensors


def state_tensors(program: Program) -> StateTensors:
    """What a run of `program` keeps from step to step, and how its mesh holds it."""
    found = []
    for name, layout in program.parameters.items():
        if layout.stages:
            dtype = program.dtype_of(layout)
            found.append(
                StateTensor(f"model.{name}", "parameter", name, dtype, layout.shape, layout)
            )
    for state, names in program.optimizer_states().items():
        for name in names:
            layout = program.parameters[name]
            held = f"{state}.{name}"
            dtype = program.dtype_of(layout)
            if layout.stages:
                found.append(
                    StateTensor(f"optimizer.{held}", "optimizer", held, dtype, layout.shape, layout)
                )
    for name, buffer in program.buffers.items():
        if buffer.stage is not None:
            writer = buffer.writer(program.mesh)
            found.append(
                StateTensor(
                    f"buffer.{name}", "buffer", name, buffer.dtype, buffer.shape, None, writer
                )
            )
    return StateTensors(program.mesh, tuple(found))
