"""`msc doctor`: check this machine, or all machines of a job, before it runs or after it failed.

Alone it starts ranks on this machine; under torchrun each process is a rank, and checks its machine
too if it is the first one there. Only rank 0 prints.
"""

from __future__ import annotations

import functools
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from torch.distributed.rendezvous import rendezvous

import msc
from msc.command_exit import DIFFERENT, Json, guarded
from msc.ir.errors import UserError
from msc.ir.torch_private import PrefixStore
from msc.runtime.checkpoint.storage import open_storage
from msc.runtime.doctor.between import check_peers
from msc.runtime.doctor.check import FAIL, Check, judge, run_check
from msc.runtime.doctor.compute import check_gemm, check_memory
from msc.runtime.doctor.devices import check_devices
from msc.runtime.doctor.disk import check_storage
from msc.runtime.doctor.exclude import exclude, read_excluded
from msc.runtime.doctor.network import check_interfaces, check_loopback, check_names
from msc.runtime.doctor.peers import Peers
from msc.runtime.doctor.processes import LocalRanks
from msc.runtime.doctor.reference import load_reference, save_reference
from msc.runtime.member_groups import member_group


@dataclass(frozen=True)
class Effort:
    """How much is done. Sizes are bytes; timeout_s is for one check between processes."""

    memory: int
    loopback: int
    storage: int
    pair: int
    products: int
    timeout_s: float


WHOLE = Effort(512 << 20, 512 << 20, 128 << 20, 4 << 20, 50, 20.0)
QUICK = Effort(64 << 20, 32 << 20, 4 << 20, 256 << 10, 3, 2.0)


@dataclass(frozen=True)
class Machine:
    """What one machine's own checks have found."""

    host: str
    checks: list[Check]


def machine_checks(effort: Effort, storage: str | None, gpus: int | None) -> list[Check]:
    """The checks of this machine alone, one after the other."""
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("devices", lambda: check_devices(gpus)),
        ("interfaces", check_interfaces),
        ("names", check_names),
        ("memory", lambda: check_memory(effort.memory)),
        ("loopback", lambda: check_loopback(effort.loopback)),
    ]
    for device in devices:
        gemm = functools.partial(check_gemm, device, effort.products)
        checks.append((f"gemm {device}", gemm))
    if storage is not None:
        opened = open_storage(storage)
        checks.append((f"storage {opened}", lambda: check_storage(opened, effort.storage)))
    return [run_check(name, check) for name, check in checks]


def run_alone(
    effort: Effort, nproc: int, storage: str | None, gpus: int | None
) -> tuple[list[Machine], list[Check], list[str]]:
    """This machine, and what `nproc` ranks on it find between them; the host of each rank."""
    ranks = LocalRanks(nproc, effort.pair, effort.timeout_s, msc.__version__)
    ranks.start()  # first: processes are forked from one that has no threads yet
    between = ranks.finish()
    host = socket.gethostname()
    machine = Machine(host, machine_checks(effort, storage, gpus))
    return [machine], between, [host] * nproc


def run_in_job(
    effort: Effort, storage: str | None, gpus: int | None
) -> tuple[list[Machine], list[Check], list[str]]:
    """As one rank of a launcher's; complete on rank 0 only."""
    timeout = timedelta(seconds=10 * effort.timeout_s)
    try:
        shared, rank, world = next(iter(rendezvous("env://", timeout=timeout)))
    except (ValueError, dist.DistError) as error:
        raise UserError(
            f"The ranks of the job cannot meet: {error}\nRANK is set, so this is a rank of a "
            "launcher's such as torchrun. Without it this machine alone is checked."
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"msc-doctor-{attempt}", shared)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    host = socket.gethostname()
    mine = machine_checks(effort, storage, gpus) if local == 0 else []
    store.set(f"machine/{rank}", json.dumps([host, [check.to_json() for check in mine]]))
    try:
        raws = store.multi_get([f"machine/{other}" for other in range(world)])
    except dist.DistError as error:
        raise UserError(
            f"Not all of {world} ranks have checked their machines within {timeout}: {error}"
        ) from error
    told = [json.loads(raw) for raw in raws]
    hosts = [name for name, _ in told]
    machines = [
        Machine(name, [Check.from_json(each) for each in checks]) for name, checks in told if checks
    ]
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        device, backend = torch.device("cuda", local), "nccl"
        torch.cuda.set_device(device)
    short = timedelta(seconds=effort.timeout_s)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=short)
    members = [other for other, name in enumerate(hosts) if name == host]
    group = member_group(members, short)
    peers = Peers(store, rank, world, effort.pair, device, short, msc.__version__)
    between = check_peers(peers, group, members)
    dist.destroy_process_group()
    if rank:
        store.set(f"left/{rank}", "")
    else:  # the store may be in this process
        store.wait([f"left/{other}" for other in range(1, world)], short)
    return machines, between, hosts


def blamed_hosts(
    machines: Sequence[Machine], between: Sequence[Check], hosts: Sequence[str]
) -> dict[str, list[str]]:
    """Host -> why it should be left out of a job.

    A failure between ranks that names none of them is put down to a host only if there is one.
    """
    found: dict[str, list[str]] = {}
    for machine in machines:
        for check in machine.checks:
            if check.status == FAIL:
                found.setdefault(machine.host, []).append(f"{check.name}: {check.detail}")
    for check in between:
        if check.status == FAIL:
            blamed = {hosts[rank] for rank in check.ranks} or set(hosts)
            if check.ranks or len(blamed) == 1:
                for host in sorted(blamed):
                    found.setdefault(host, []).append(f"{check.name}: {check.detail}")
    return found


def lines_of(host: str, checks: Sequence[Check]) -> list[str]:
    """A line for each check."""
    lines = [host]
    for check in checks:
        values = ", ".join(f"{name} {value}" for name, value in check.values.items())
        words = "; ".join(text for text in (values, check.detail) if text)
        lines.append(f"  {check.status:8} {check.name:14} {check.seconds:6.2f} s  {words}")
    return lines


Quick = Annotated[bool, typer.Option("--quick", help="A few seconds, for a suspect.")]
StorageUrl = Annotated[
    str | None, typer.Option("--storage", help="Also write to and read from this folder or URL.")
]
Nproc = Annotated[int, typer.Option("--nproc", min=2, help="Ranks to start on this machine.")]
Gpus = Annotated[int | None, typer.Option("--gpus", min=0, help="CUDA devices that must be there.")]
ExcludeFile = Annotated[
    Path | None,
    typer.Option("--exclude", help="Add hosts that fail to this JSON list, with the reason."),
]
ReferenceFile = Annotated[
    Path | None, typer.Option("--reference", help="What a sound machine of this kind measures.")
]
WriteReference = Annotated[
    Path | None, typer.Option("--write-reference", help="Write it, from this machine.")
]


def doctor(
    quick: Quick = False,
    storage: StorageUrl = None,
    nproc: Nproc = 2,
    gpus: Gpus = None,
    exclude_file: ExcludeFile = None,
    reference: ReferenceFile = None,
    write_reference: WriteReference = None,
    as_json: Json = False,
) -> None:
    """Check machines: memory, processors, devices, network, names, clocks, storage, versions.

    Under torchrun it checks all machines of the job. "measured" has neither passed nor failed: it
    is not known to be bad, and there is no --reference. Exit code 1 if a check has failed.
    """

    def action() -> Callable[[], int]:
        started = time.perf_counter()
        effort = QUICK if quick else WHOLE
        in_job = "RANK" in os.environ
        judges = os.environ.get("RANK", "0") == "0"
        known = None
        if judges:  # what is wrong with its files is told before all is checked
            known = None if reference is None else load_reference(reference, quick)
            for file in (exclude_file, write_reference):
                if file is not None and not file.parent.is_dir():
                    raise UserError(f"{file} cannot be written: there is no folder {file.parent}.")
            if exclude_file is not None:
                read_excluded(exclude_file)
        if in_job:
            machines, between, hosts = run_in_job(effort, storage, gpus)
        else:
            machines, between, hosts = run_alone(effort, nproc, storage, gpus)
        if not judges:
            return lambda: 0
        machines = [replace(m, checks=[judge(c, known) for c in m.checks]) for m in machines]
        between = [judge(check, known) for check in between]
        every = [check for machine in machines for check in machine.checks] + between
        blamed = blamed_hosts(machines, between, hosts)
        if exclude_file is not None and blamed:
            exclude(exclude_file, blamed)
        if write_reference is not None:
            save_reference(write_reference, every, quick)
        bad = [check.name for check in every if check.status == FAIL]
        seconds = time.perf_counter() - started

        def show() -> int:
            if as_json:
                told = {
                    "machines": {m.host: [c.to_json() for c in m.checks] for m in machines},
                    "between": [check.to_json() for check in between],
                    "blamed": blamed,
                    "failed": bad,
                    "seconds": seconds,
                }
                print(json.dumps(told, indent=2))
            else:
                for machine in machines:
                    print("\n".join(lines_of(machine.host, machine.checks)))
                print("\n".join(lines_of(f"between {len(hosts)} ranks", between)))
                verdict = f"failed: {', '.join(bad)}" if bad else "no check failed"
                print(f"{verdict} ({seconds:.1f} s)")
            return DIFFERENT if bad else 0

        return show

    raise typer.Exit(guarded(action, as_json))


def main() -> None:
    """`msc doctor` by itself, which needs no compiler and so starts at once."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command("doctor")(doctor)
    app(prog_name="msc doctor")


if __name__ == "__main__":
    main()
