"""The list of hosts that no job should be given, as JSON: {"hosts": {"node7": {..}}}."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msc.ir.errors import UserError


def exclude(file: Path, hosts: Mapping[str, Sequence[str]]) -> None:
    """Add hosts with the reasons; a host that is on the list already has its entry replaced.

    Several processes may write, also of several machines. The file is there whole or not at all.
    Raises `UserError` for a file that is no such list, or that cannot be written.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    try:
        with open(file.with_name(f".{file.name}.lock"), "w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            known = read_excluded(file)
            for host, reasons in hosts.items():
                known[host] = {"reasons": list(reasons), "since": now}
            part = file.with_name(f".{file.name}.{os.getpid()}")
            part.write_text(json.dumps({"hosts": known}, indent=2) + "\n")
            os.replace(part, file)
    except OSError as error:
        raise UserError(f"The exclude list {file} cannot be written: {error}") from error


def read_excluded(file: Path) -> dict[str, Any]:
    """Host -> its entry; none if there is no file."""
    try:
        found = json.loads(file.read_text())["hosts"]
        if isinstance(found, dict):
            return found
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        pass
    raise UserError(f'{file} is no exclude list: it should be {{"hosts": {{..}}}}.')
