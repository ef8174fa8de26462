"""A gate and its gradient: `activation(gate) * up` in one pass over memory each way."""

from __future__ import annotations

from dataclasses import dataclass

from msc.codegen.kernels.description import Argument, Kernel, Target, power_of_two, signature
from msc.codegen.kernels.dtypes import check_dtype, short
from msc.codegen.kernels.epilogue import activated
from msc.codegen.kernels.source import fill, module
from msc.ir.errors import PlanError

BLOCK = 1024
PROGRAMS_PER_PROCESSOR = 16
LANE = 8
"""Elements to whose multiples rows are aligned, where a row has so many."""

FORWARD = """
@triton.jit
def gate_forward($arguments):
    <<hints>>
    for row in range(tl.program_id(0).to(tl.int64), ROWS, PROGRAMS):
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < WIDTH
            value = tl.load(gate + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
            other = tl.load(up + row * up_row + columns, mask=inside, other=0.0).to(tl.float32)
            result = $active * other
            at = row * WIDTH + columns
            tl.store(y + at, result.to(tl.$dtype), mask=inside)
"""

BACKWARD = """
@triton.jit
def gate_backward($arguments):
    <<hints>>
    for row in range(tl.program_id(0).to(tl.int64), ROWS, PROGRAMS):
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            inside = columns < WIDTH
            at = row * WIDTH + columns
            gradient = tl.load(gy + at, mask=inside, other=0.0).to(tl.float32)
            value = tl.load(gate + row * gate_row + columns, mask=inside, other=0.0).to(tl.float32)
            other = tl.load(up + row * up_row + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(d_up + at, ($active * gradient).to(tl.$dtype), mask=inside)
            <<slope>>
            tl.store(d_gate + at, (gradient * other * slope).to(tl.$dtype), mask=inside)
"""

SLOPES = {
    "relu": "slope = tl.where(value <= 0.0, 0.0, 1.0)",
    "gelu": """
        below = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
        slope = below + value * 0.3989422804014327 * tl.exp(-0.5 * value * value)
    """,
    "gelu_tanh": """
        below = tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * value * value)
        slope = below + value * below * (1.0 - below) * inner
    """,
    "silu": """
        below = tl.sigmoid(value)
        slope = below * (1.0 + value * (1.0 - below))
    """,
}
"""The derivatives of the activations of `epilogue.py`."""


@dataclass(frozen=True)
class Gate:
    """All tensors are [rows, width] of dtype; rows of gate and up may lie apart, as halves do.

    gate_row, up_row: from one row to the next, multiples of `LANE` where width is one.
    """

    rows: int
    width: int
    activation: str
    dtype: str
    target: Target

    def __post_init__(self) -> None:
        check_dtype("gate", self.dtype)
        if self.activation not in SLOPES:
            raise PlanError(f"gate: no activation {self.activation!r}; there are {[*SLOPES]}")

    @property
    def programs(self) -> int:
        """Each takes every so many-th row."""
        return min(self.rows, self.target.processors * PROGRAMS_PER_PROCESSOR)


def emit_forward(gate: Gate) -> Kernel:
    """gate, up -> y."""
    return _kernel(gate, "gate_forward", FORWARD, ["gate", "up", "y"])


def emit_backward(gate: Gate) -> Kernel:
    """gy, gate, up -> d_gate, d_up."""
    return _kernel(gate, "gate_backward", BACKWARD, ["gy", "gate", "up", "d_gate", "d_up"])


def _kernel(gate: Gate, entry: str, template: str, names: list[str]) -> Kernel:
    numbers = ("gate_row", "up_row")
    arguments = (
        *(Argument(name, "pointer", gate.dtype) for name in names),
        *(Argument(name, "int64") for name in numbers),
    )
    hints = [f"{name} = tl.multiple_of({name}, {LANE})" for name in numbers]
    slope = SLOPES[gate.activation].strip()
    text = fill(
        template,
        arguments=signature(arguments),
        hints="\n".join(hints) if gate.width % LANE == 0 else "",
        active=f"({activated(gate.activation, 'value')})",
        slope="\n".join(line.strip() for line in slope.splitlines()),
        dtype=gate.dtype,
    )
    constants = {
        "ROWS": gate.rows,
        "WIDTH": gate.width,
        "BLOCK": min(BLOCK, max(16, power_of_two(gate.width))),
        "PROGRAMS": gate.programs,
    }
    size = f"{gate.rows}x{gate.width}_{short(gate.dtype)}"
    return Kernel(
        f"{entry}_{gate.activation}_{size}",
        module(f"{gate.activation} gate of [{gate.rows}, {gate.width}].", constants, text),
        entry,
        arguments,
        (gate.programs,),
        gate.target,
        4,
        1,
    )
