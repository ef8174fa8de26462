"""Compiles a kernel for a device that is not there, and reads what the compiler made of it.

Triton's wheel carries ptxas, cuobjdump and nvdisasm, so that registers, spills, shared memory and
the instructions are known without a GPU. That an instruction is there says nothing of its speed.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from msc.codegen.kernels.description import Argument, Kernel
from msc.codegen.kernels.dtypes import short
from msc.codegen.kernels.launch import function, interpreting
from msc.codegen.kernels.ptx_order import findings

_NUMBERS = {"int32": "i32", "int64": "i64"}
_STORED = {"int32": "i32", "int64": "i64", "float64": "fp64"}


@dataclass(frozen=True)
class Report:
    """What was compiled. spills: loads and stores of local memory. shared: bytes, also the limit.

    matrix: whether it multiplies matrices on tensor cores; wgmma: whether by Hopper's instructions.
    lint: wrong orderings in the PTX.
    """

    name: str
    target: str
    registers: int
    spills: int
    shared: int
    shared_limit: int
    matrix: bool
    wgmma: bool
    lint: list[str]
    compile_s: float

    def faults(self) -> list[str]:
        """Why this kernel must not be used; empty if it may."""
        found: list[str] = []
        if self.spills:
            found.append(f"{self.spills} spills")
        if self.shared > self.shared_limit:
            found.append(f"{self.shared} bytes of shared memory; there are {self.shared_limit}")
        if self.matrix and self.target == "sm_90" and not self.wgmma:
            found.append("no wgmma")
        return [*found, *self.lint]

    def row(self) -> dict[str, Any]:
        """The report as it stands in a file."""
        return asdict(self)


def compile_kernel(kernel: Kernel) -> Report:
    """Compile for the kernel's target. RuntimeError where Triton only interprets."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if interpreting():
        raise RuntimeError(
            "Triton was imported with TRITON_INTERPRET=1 and cannot compile in this process"
        )
    signature = {argument.name: _type(argument) for argument in kernel.arguments}
    aligned: Any = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(kernel.arguments)
        if argument.kind in ("pointer", "table")
    }
    source = ASTSource(function(kernel), signature=signature, constexprs={}, attrs=aligned)
    start = time.perf_counter()
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        target = GPUTarget("cuda", kernel.target.capability, 32)
        compiled = triton.compile(source, target=target, options=kernel.options)
    seconds = time.perf_counter() - start
    usage, instructions = _disassembled(compiled.asm["cubin"])
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return Report(
        name=kernel.name,
        target=kernel.target.name,
        registers=int(registers[1]),
        spills=_count(instructions, "LDL") + _count(instructions, "STL"),
        shared=int(compiled.metadata.shared),
        shared_limit=kernel.target.shared_limit,
        matrix=kernel.matrix,
        wgmma=_count(instructions, "HGMMA") > 0,
        lint=findings(compiled.asm["ptx"]),
        compile_s=round(seconds, 2),
    )


def _type(argument: Argument) -> str:
    if argument.kind in _NUMBERS:
        return _NUMBERS[argument.kind]
    if argument.kind == "table":
        return "*i64"
    dtype = _STORED.get(argument.dtype) or short(argument.dtype)
    if argument.kind == "descriptor":
        return f"tensordesc<{dtype}[{','.join(map(str, argument.block))}]>"
    return f"*{dtype}"


def _disassembled(binary: bytes) -> tuple[str, str]:
    """Resource usage and SASS of a cubin."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        calls = ([str(tools / "cuobjdump"), "-res-usage"], [str(tools / "nvdisasm"), "-c"])
        usage, instructions = (
            subprocess.run([*call, file.name], capture_output=True, text=True, check=True).stdout
            for call in calls
        )
    return usage, instructions


def _count(instructions: str, name: str) -> int:
    return len(re.findall(rf"\b{name}\b", instructions))
