"""Write a program's graphs, and what every pass made of it, as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msc.codegen.kernel_calls.choice import KernelChoice
from msc.ir.dump import make_folder
from msc.ir.printer import format_graph

if TYPE_CHECKING:
    from msc.program import Program


def write_dump(program: Program, path: Path) -> None:
    """What `Program.dump` promises."""
    make_folder(path)
    lines = [f"program on mesh {program.mesh}", ""]
    ranks_of: dict[int, list[int]] = {}
    for rank in range(program.mesh.size):
        ranks_of.setdefault(program.class_of(rank), []).append(rank)
    for index, prefix in enumerate(program.class_names):
        ranks = ranks_of[index]
        texts = {"step": format_graph(program.rank_graphs[index], f"one step of {prefix}")}
        texts |= {name: format_graph(gm, name) for name, gm in program.graphs(ranks[0]).items()}
        for name, text in texts.items():
            (path / f"{prefix}.{name}.txt").write_text(text + "\n")
        lines.append(f"{_listed(ranks)}: " + ", ".join(f"{prefix}.{n}.txt" for n in texts))
    if program.pass_results is not None:
        program.pass_results.write(path / "passes")
        lines.append("the program after each pass: passes/index.txt")
    choice = program.kernels()
    if choice.sources:
        write_kernels(choice, path / "kernels")
        lines.append("which ops run in Triton kernels, and their texts: kernels/index.txt")
    (path / "index.txt").write_text("\n".join(lines) + "\n")


def write_kernels(choice: KernelChoice, path: Path) -> None:
    """The text of every distinct kernel, and `index.txt`: what became of each op, and why."""
    make_folder(path)
    taken: dict[str, int] = {}
    for kernel in choice.sources:
        taken[kernel.name] = number = taken.get(kernel.name, 0) + 1
        name = kernel.name if number == 1 else f"{kernel.name}-{number}"
        (path / f"{name}.py").write_text(kernel.source)
    (path / "index.txt").write_text("\n".join(choice.lines) + "\n")


def _listed(ranks: list[int]) -> str:
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= 64 else f"{len(ranks)} ranks"
