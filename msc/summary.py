"""What a compiled program or a comparison says about itself, as tables and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from msc.ir.rewrites import LEFT_ALONE
from msc.ir.words import counted

if TYPE_CHECKING:
    from msc.program import Program
    from msc.verification import VerifyReport

_WIDTH = 120


def compile_json(program: Program, dump: Path | None) -> dict[str, Any]:
    """The facts of `print_compile` as plain data."""
    report = program.report
    return {
        "mesh": dict(program.mesh.axes),
        "ranks": program.mesh.size,
        "micro_batches": program.micro_batches,
        **report.to_json(),
        "distinct_rank_graphs": len(program.rank_graphs),
        "memory_bytes": program.memory_bytes(),
        "cpu_seconds": dict(report.cpu_seconds),
        "dump": None if dump is None else str(dump),
    }


def verify_json(report: VerifyReport) -> dict[str, Any]:
    """The facts of `print_verify` as plain data, with the error of every gradient.

    An infinite error (a value that one side lacks, or NaN on one side) is the string "inf".
    """
    return {
        "ok": report.ok,
        "loss": _number(report.loss),
        "reference_loss": _number(report.reference_loss),
        "loss_error": _number(report.loss_error),
        "grad_errors": {name: _number(error) for name, error in report.grad_errors.items()},
        "eager_errors": {name: _number(error) for name, error in report.eager_errors.items()},
        "tolerance": report.tolerance,
        "first_difference": report.first_difference,
        "sharded": {axis: dict(found) for axis, found in report.sharded.items()},
        "notes": list(report.notes),
        "fallbacks": list(report.fallbacks),
    }


def print_verify(report: VerifyReport) -> None:
    """Say whether the two programs agree, and how well."""
    console = _console()
    worst = max(report.grad_errors, key=report.grad_errors.__getitem__, default=None)
    rows = [
        ("loss, parallel", f"{report.loss:.12g}", ""),
        ("loss, one device", f"{report.reference_loss:.12g}", f"error {report.loss_error:.2e}"),
    ]
    if worst is not None:
        count = f"{len(report.grad_errors)} gradients"
        rows.append((count, f"worst {worst}", f"error {report.grad_errors[worst]:.2e}"))
    if report.eager_errors:
        name = max(report.eager_errors, key=report.eager_errors.__getitem__)
        error = f"error {report.eager_errors[name]:.2e}"
        rows.append(("captured against eager", f"worst {name}", error))
    _print_table(console, "", ("", "", ""), rows)
    _print_sharded(console, report.sharded)
    _print_lines(console, "fallbacks", report.fallbacks)
    _print_lines(console, "notes", report.notes)
    if report.ok:
        console.print(f"ok: loss and all gradients agree within {report.tolerance:g}", markup=False)
    else:
        console.print(f"DIFFERENT: {report.first_difference}", markup=False)


def print_compile(program: Program, dump: Path | None) -> None:
    """Say what was made: chunks, graphs, collectives, memory, times."""
    console = _console()
    report = program.report
    mesh = program.mesh
    console.print(
        f"{mesh.size} ranks on mesh {mesh}, {program.micro_batches} micro-batches: "
        f"{report.instances} block instances of {report.distinct_blocks} distinct blocks, "
        f"{len(report.chunks)} chunks, {len(program.rank_graphs)} distinct rank graphs",
        markup=False,
    )
    memory = program.memory_bytes()
    _print_table(
        console,
        "chunks",
        ("chunk", "stage", "blocks", "from", "to", "memory of a rank"),
        [
            (
                str(i),
                str(stage),
                str(len(paths)),
                _path(paths[0]),
                _path(paths[-1]),
                _bytes(memory[stage * len(program.tp_bounds)]),
            )
            for i, (paths, stage) in enumerate(zip(report.chunks, report.chunk_stages, strict=True))
        ],
    )
    if len(report.chunks) > 1:
        held = ", ".join(map(str, report.schedule.live_activations))
        console.print(
            f"\nschedule {report.schedule.name}, {report.schedule.virtual_stages} virtual stages: "
            f"modelled bubble {report.schedule.bubble:.1%} of the work; activations of at most "
            f"{held} chunks and micro-batches at once, by stage",
            markup=False,
        )
    _print_table(
        console,
        "collectives per step of one rank",
        ("stage", "kind", "calls", "bytes"),
        [
            (name.removeprefix("stage"), kind, str(calls), _bytes(size))
            for name, found in zip(program.class_names, report.collectives, strict=True)
            for kind, (calls, size) in found.items()
        ],
    )
    _print_sharded(console, report.sharded)
    seconds = report.cpu_seconds
    _print_table(
        console,
        "CPU seconds",
        ("pass", "seconds"),
        [(name, f"{value:.3f}") for name, value in seconds.items()]
        + [("total", f"{sum(seconds.values()):.3f}")],
    )
    _print_lines(console, "fused collectives", _fusions(report.fused_collectives))
    _print_lines(console, "fused losses", _fusions(report.fused_losses))
    _print_lines(console, "epilogues", _fusions(report.epilogues))
    _print_lines(console, "fallbacks", report.fallbacks)
    _print_lines(console, "notes", report.notes)
    if dump is not None:
        console.print(f"graphs written to {dump}, see {dump / 'index.txt'}", markup=False)


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def _print_sharded(console: Console, sharded: Mapping[str, Mapping[str, float]]) -> None:
    rows = [
        (axis, f"{found['flops']:.1%}", f"{found['parameters']:.1%}")
        for axis, found in sharded.items()
    ]
    _print_table(console, "fraction sharded", ("axis", "FLOPs", "parameter bytes"), rows)


def _print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    rows = list(rows)
    if not rows:
        return
    if title:
        console.print(f"\n{title}", markup=False)
    table = Table(box=None, show_header=any(columns), pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        numeric = title and all(row[index][:1].isdigit() for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(cell.replace("[", r"\[") for cell in row))
    console.print(table)


def _print_lines(console: Console, title: str, lines: Sequence[str]) -> None:
    if lines:
        console.print(f"\n{title}", markup=False)
    for line in lines:
        console.print(f"  {line}", markup=False)


def _fusions(findings: Sequence[str]) -> list[str]:
    """What was fused, and for what reasons how many places were not."""
    fused = [each for each in findings if LEFT_ALONE not in each]
    reasons = Counter(each.partition(LEFT_ALONE)[2] for each in findings if LEFT_ALONE in each)
    return [
        *fused,
        *(f"{counted(count, 'place')} left alone: {why}" for why, count in reasons.items()),
    ]


def _path(path: str) -> str:
    return path or "(model)"


def _number(value: float) -> float | str:
    """JSON has no NaN and no infinity."""
    return value if value - value == 0 else str(value)


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
