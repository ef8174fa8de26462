"""`msc.tune`: measure the calls of a model's program here, and keep it for `msc.compile`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from msc.codegen.kernel_calls.device import kernels_on
from msc.compiler import compile as compile_program
from msc.cost.hardware import device_name
from msc.cost.measurements import Measurements, versions_here
from msc.ir.errors import UserError
from msc.tuning.fused import fused_calls, measure_fused
from msc.tuning.kernels import kernel_calls, measure_call

Log = bool | Callable[[str], None]


def tune(
    model: nn.Module,
    inputs: tuple[Any, ...] | dict[str, Any],
    file: str | Path,
    *,
    device: str | None = None,
    log: Log = True,
    **options: Any,
) -> Measurements:
    """Measure how fast this device computes the calls of a model's program, in each way it can.

    Of a call that has Triton kernels: ATen, and the kernels, products in each of the tiles that
    compile without spills. Of collectives that can be one op with their GEMMs: that op, and both
    one after the other, on ranks that are started on this host; more ranks than it has devices (on
    the CPU, cores) are not measured. What the file has already is not measured again, and each call
    is kept as soon as it is known. `msc.compile(.., tuned=file)` then goes by it.

    Args:
        model, inputs: as of `msc.compile`.
        file: JSON, of one kind of device; may hold calls of other programs.
        device: "cpu" or "cuda"; None takes CUDA where there is one.
        log: True prints a line per call; a function is called with it.
        options: those of `msc.compile`, as mesh, microbatches, precision.

    Raises:
        UserError: the file is of another device, or no measurements; or a rank failed.
    """
    if {"tuned", "fuse_collectives"} & set(options):
        raise UserError("tune measures both ways of fuse_collectives, without what was tuned.")
    place = _place(device)
    kernels = kernels_on(place)
    found = _begun(file, kernels.device or device_name(place))
    tell = print if log is True else (log or (lambda line: None))
    if found.calls:
        tell(f"{len(found.calls)} calls are known from '{file}' and not measured again.")
    programs = [compile_program(model, inputs, fuse_collectives=False, **options)]
    if programs[0].mesh.size > 1:
        programs.append(compile_program(model, inputs, fuse_collectives=True, **options))
    graphs = [graph for program in programs for graph in program.rank_graphs]
    if kernels.target is None:
        tell(f"No calls in kernels are measured: {kernels.reason}.")
    for text, node in kernel_calls(graphs).items() if kernels.target else ():
        if text not in found.calls:
            seconds = measure_call(node, kernels, place, tell)
            if seconds:
                found = _kept(found.with_calls({text: seconds}), file)
                tell(_line(text, seconds))
    if programs[0].mesh.size > 1:
        calls = fused_calls(graphs)
        missing = {text: gm for text, gm in calls.items() if text not in found.calls}
        for text, seconds in measure_fused(missing, place, tell).items():
            found = found.with_calls({text: seconds})
            tell(_line(text, seconds))
    return _kept(found, file)


def _place(device: str | None) -> torch.device:
    """The device to measure on."""
    there = torch.cuda.is_available()
    kind = device or ("cuda" if there else "cpu")
    if kind not in ("cpu", "cuda"):
        raise UserError(f"device is {device!r}; it is 'cpu', 'cuda', or None for what is there.")
    if kind == "cuda" and not there:
        raise UserError(
            f"device is 'cuda', and torch {torch.__version__} finds no CUDA device here. Measure "
            "on the machine where the program will run, or pass device='cpu'."
        )
    return torch.device(kind)


def _begun(file: str | Path, device: str) -> Measurements:
    """What the file has already; nothing of other versions, whose code is other code."""
    if not isinstance(file, (str, Path)):
        raise UserError(f"file is a {type(file).__name__}; it is the path of a JSON file.")
    versions = versions_here()
    empty = Measurements(device, versions)
    if not Path(file).exists():
        return _kept(empty, file)  # before anything is measured, and lost
    found = Measurements.load(file)
    if found.device != device:
        raise UserError(
            f"'{file}' has measurements of {found.device}, and this device is {device}: a file is "
            "of one kind of device. Name another file."
        )
    return found if dict(found.versions) == versions else empty


def _kept(found: Measurements, file: str | Path) -> Measurements:
    try:
        found.save(file)
    except OSError as error:
        raise UserError(f"'{file}' cannot be written: {error}") from error
    return found


def _line(text: str, seconds: dict[str, float]) -> str:
    ways = sorted(seconds.items(), key=lambda item: item[1])
    times = ", ".join(f"{way} {1e6 * value:,.1f} us" for way, value in ways[:3])
    more = f" and {len(ways) - 3} more" if len(ways) > 3 else ""
    return f"{text}: {times}{more}"
