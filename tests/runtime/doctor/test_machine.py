"""Each check of a machine fails by the fault that it is for, which is injected."""

from __future__ import annotations

import errno
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from msc.runtime.checkpoint.storage import LocalStorage
from msc.runtime.doctor import compute
from msc.runtime.doctor.check import run_check
from msc.runtime.doctor.compute import check_gemm, check_memory
from msc.runtime.doctor.devices import check_devices
from msc.runtime.doctor.disk import check_storage
from msc.runtime.doctor.network import check_interfaces, check_loopback, check_names

CPU = torch.device("cpu")


def test_a_sound_processor_multiplies_exactly() -> None:
    assert check_gemm(CPU, 1).status == "pass"


@pytest.mark.parametrize("broken", [torch.float64, torch.float32, torch.bfloat16])
def test_one_wrong_element_of_a_product_is_found(broken: torch.dtype) -> None:
    turns = iter(range(100))

    def multiply(left: Tensor, right: Tensor) -> Tensor:
        found = left @ right
        if left.dtype == broken and next(turns) == 1:  # in the second product alone
            found[3, 5] += 1
        return found

    found = check_gemm(CPU, 2, multiply)
    assert found.status == "fail"
    assert f"1 of 262144 elements of product 2 in {broken} are wrong" in found.detail
    assert "first [3,5]" in found.detail


def test_a_processor_that_has_another_answer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "ANSWERS", {depth: "0" * 16 for depth in compute.ANSWERS})
    assert "is not the stored answer" in check_gemm(CPU, 1).detail


def test_memory_that_loses_a_word_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_memory(1 << 20).status == "measured"
    copy = Tensor.copy_

    def lossy(target: Tensor, source: Tensor) -> Tensor:
        copy(target, source)
        target[7] = -1
        return target

    monkeypatch.setattr(Tensor, "copy_", lossy)
    assert check_memory(1 << 20).detail == "1 of 131072 words of a copy differ"


def test_a_loopback_that_changes_or_loses_bytes_is_found() -> None:
    assert check_loopback(2 << 20).status == "measured"

    def flips(connection: socket.socket, into: memoryview) -> int:
        count = connection.recv_into(into)
        into[0] ^= 1
        return count

    assert "arrived changed" in check_loopback(2 << 20, flips).detail

    def ends(connection: socket.socket, into: memoryview) -> int:
        connection.shutdown(socket.SHUT_RD)
        return 0

    assert "the connection ended after 0" in check_loopback(1 << 20, ends).detail


def interface(root: Path, name: str, state: str) -> None:
    (root / "net" / name).mkdir(parents=True)
    (root / "net" / name / "operstate").write_text(f"{state}\n")


def port(root: Path, state: str) -> None:
    (root / "infiniband" / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    (root / "infiniband" / "mlx5_0" / "ports" / "1" / "state").write_text(state)


def test_interfaces_that_are_down_are_named(tmp_path: Path) -> None:
    interface(tmp_path, "lo", "unknown")
    interface(tmp_path, "eth0", "down")
    found = check_interfaces(tmp_path)
    assert (found.status, found.detail) == ("fail", "up: none; down: eth0")
    port(tmp_path, "4: ACTIVE\n")
    found = check_interfaces(tmp_path)
    assert (found.status, found.facts) == ("measured", ("mlx5_0:1",))
    assert found.detail == "up: mlx5_0:1; down: eth0"


def test_devices_that_torch_does_not_see_are_missed(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert check_devices(2, tmp_path, visible=2).status == "pass"
    assert check_devices(None, tmp_path, visible=1).detail == (
        "torch sees 1 CUDA devices, the driver has 2"
    )
    assert "8 are expected" in check_devices(8, tmp_path, visible=2).detail


def test_look_ups_that_do_not_answer_are_found() -> None:
    def forward(*_: Any, **__: Any) -> Any:
        return [(0, 0, 0, "", ("10.0.0.7", 0))]

    def reverse(*_: Any) -> Any:
        return ("node7", "0")

    asked: list[Any] = []

    def noted(address: Any, flags: int) -> Any:
        asked.append(address)
        return reverse()

    found = check_names(forward, noted)
    assert (found.status, list(found.values)) == ("pass", ["forward", "reverse", "mapped"])
    assert asked == [("10.0.0.7", 0), ("::ffff:10.0.0.7", 0)]
    assert "no other host" not in found.detail

    def alone(*_: Any, **__: Any) -> Any:
        return [(0, 0, 0, "", ("127.0.1.1", 0))]

    assert "127.0.1.1 is node7; no other host reaches that" in check_names(alone, noted).detail
    stop = threading.Event()

    def hangs(*_: Any) -> Any:
        stop.wait()
        raise OSError("too late")

    assert "no answer about" in check_names(forward, hangs, patience_s=0.05).detail
    stop.set()

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("Name or service not known")

    assert "cannot be looked up: Name or service" in check_names(unknown, reverse).detail


class Faulty(LocalStorage):
    """A folder that goes wrong in one way."""

    def __init__(self, folder: Path, fault: str) -> None:
        super().__init__(folder)
        self.fault = fault

    def write(self, name: str, blocks: Iterable[memoryview]) -> None:
        if self.fault == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(name, blocks)

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        found = super().read(name, start, length)
        if self.fault == "short":
            return found[:-1]
        return bytes([found[0] ^ 1]) + found[1:] if self.fault == "flip" else found


@pytest.mark.parametrize(
    ("fault", "detail"),
    [
        ("", "0 MiB came back as they were written"),
        ("full", "OSError: [Errno 28] No space left on device"),
        ("flip", "the digest of 1000 bytes that came back differs"),
        ("short", "999 of 1000 bytes came back"),
    ],
)
def test_a_storage_that_does_not_keep_its_bytes_is_found(
    tmp_path: Path, fault: str, detail: str
) -> None:
    found = run_check("storage", lambda: check_storage(Faulty(tmp_path, fault), 1000))
    assert found.status == ("fail" if fault else "pass")
    assert found.detail == detail
    assert list(tmp_path.iterdir()) == []
