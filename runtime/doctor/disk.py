"""Check of a storage: write, make durable, read back, compare, remove."""

from __future__ import annotations

import contextlib
import os
import socket
import time

from msc.runtime.checkpoint.manifest import digest
from msc.runtime.checkpoint.storage import BLOCK, Storage
from msc.runtime.doctor.check import Check, Value, failed, passed


def check_storage(storage: Storage, size: int) -> Check:
    """Write a file of `size` random bytes in a folder of this process's own, and read it."""
    name = f"storage {storage}"
    data = os.urandom(size)
    folder = f"doctor-{socket.gethostname()}-{os.getpid()}"
    file = f"{folder}/data"
    try:
        storage.make_folder(folder)
        started = time.perf_counter()
        view = memoryview(data)
        storage.write(file, (view[start : start + BLOCK] for start in range(0, size, BLOCK)))
        written = time.perf_counter()
        found = storage.read(file)
        done = time.perf_counter()
    finally:
        with contextlib.suppress(OSError):  # what stopped the check is what counts
            storage.remove(folder)
    if len(found) != size:
        return failed(name, f"{len(found)} of {size} bytes came back")
    if digest(found) != digest(data):
        return failed(name, f"the digest of {size} bytes that came back differs")
    rates = {
        "write": Value(size / (written - started) / 1e6, "MB/s", floor=0.5),
        "read": Value(size / (done - written) / 1e6, "MB/s", floor=0.5),
    }
    return passed(name, f"{size >> 20} MiB came back as they were written", **rates)
