"""On which device kernels run, and what `MSC_TRITON` asks for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from msc.codegen.kernels.description import INTERPRETER, SM_80, SM_90, TARGETS, Target
from msc.codegen.kernels.launch import interpreting
from msc.cost.hardware import device_name
from msc.ir.errors import UserError
from msc.ir.flags import TRITON

INTERPRET, ALL, OFF = "interpret", "all", "off"
_VALUES = ("", INTERPRET, ALL, OFF)


@dataclass(frozen=True)
class Kernels:
    """Where kernels may be used: on `target`, or on none, with the reason.

    everywhere: also where the vendor's library is preferred. asked: the user asked for kernels, so
    that a call which has none is worth a warning. device: its name among measurements, "" where
    none is here. shared: all ranks of a group run on the device. unfused: why the executor runs no
    kernels of fused collectives, or "".
    """

    target: Target | None
    reason: str
    everywhere: bool = False
    asked: bool = False
    device: str = ""
    shared: bool = False
    unfused: str = ""


def kernels_on(device: torch.device) -> Kernels:
    """What `MSC_TRITON` and the device give; no device is asked but the one that is named.

    Raises `UserError` for a value of `MSC_TRITON` that does not exist or does not fit the device,
    and where kernels are to be interpreted but Triton was imported to compile them.
    """
    wish = asked_of_triton()
    if wish == OFF:
        return Kernels(None, f"{TRITON.name}=off")
    if wish == INTERPRET:
        return _interpreter(device)
    if device.type != "cuda":
        if wish == ALL:
            raise UserError(
                f"{TRITON.name}=all needs a CUDA device, and the program runs on '{device.type}'. "
                f"On the CPU kernels run in Triton's interpreter: {TRITON.name}=interpret."
            )
        return Kernels(None, f"no kernels run on '{device.type}' but in Triton's interpreter")
    return _on_cuda(device, wish == ALL)


def asked_of_triton() -> str:
    """The value of `MSC_TRITON`; `UserError` for one that does not exist."""
    if TRITON.text not in _VALUES:
        raise UserError(
            f"{TRITON.name}={TRITON.text!r} is not known; it is 'interpret' (kernels in Triton's "
            "interpreter, on the CPU), 'all' (every kernel there is, on CUDA), 'off', or not set."
        )
    return TRITON.text


def kernels_for(name: str) -> Kernels:
    """What a device would give that need not be here, as "sm_90"; `UserError` for another name."""
    known = {target.name: target for target in (*TARGETS, INTERPRETER)}
    if name not in known:
        raise UserError(f"target is {name!r}; kernels are made for {', '.join(known)}.")
    target = known[name]
    return Kernels(target, f"made for {name}", target.interpreted or TRITON.text == ALL)


def _interpreter(device: torch.device) -> Kernels:
    if device.type != "cpu":
        raise UserError(
            f"{TRITON.name}=interpret runs kernels on the CPU, and the program runs on "
            f"'{device.type}'. Run it with device='cpu', or leave {TRITON.name} unset."
        )
    if not interpreting():
        raise UserError(
            f"{TRITON.name}=interpret was set after Triton had been imported, which is when it "
            "decides how kernels run. Set it, or TRITON_INTERPRET=1, before Python starts."
        )
    name = device_name(device, interpreted=True)
    return Kernels(INTERPRETER, f"{TRITON.name}=interpret", True, True, name)


def _on_cuda(device: torch.device, everywhere: bool) -> Kernels:
    properties = torch.cuda.get_device_properties(device)
    if interpreting():
        return Kernels(None, "TRITON_INTERPRET=1 keeps Triton from compiling")
    found = {80: SM_80, 90: SM_90}.get(10 * properties.major + properties.minor)
    if found is None or torch.version.hip is not None:
        checked = " and ".join(target.name for target in TARGETS)
        reason = f"kernels are checked for {checked}, and this is {properties.name}"
        return Kernels(None, reason, asked=everywhere)
    target = dataclasses.replace(found, processors=properties.multi_processor_count)
    reason = f"CUDA, {properties.name}"
    return Kernels(target, reason, everywhere, everywhere, device_name(device))
