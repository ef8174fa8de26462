"""A process of a run: it becomes a rank, at once or after it has stood by.

The agent starts it as `python -m msc.runtime.recovery.worker HANDLE` and tells it what to do: which
modules to import ahead, and then which script to run, with which environment.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import os
import signal
import sys
import types
from pathlib import Path
from typing import Any

from msc.ir.errors import UserError
from msc.runtime.diagnosis.process_facts import begin_now
from msc.runtime.recovery import link
from msc.runtime.recovery.channel import Channel
from msc.runtime.recovery.journal import Journal

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Stand by, or be a rank."""
    _die_with_parent(int(sys.argv[2]))
    channel = Channel.inherited(int(sys.argv[1]))
    received = channel.receive()
    if received is not None and received[0]["event"] == "stand by":
        for module in received[0]["modules"]:
            importlib.import_module(module)
        channel.send("warm")
        received = channel.receive()
        begin_now()
    if received is None:
        return  # the run has ended, and nobody needs a standby
    message, files = received
    os.environ.update(message["environment"])
    for handle in files:
        os.set_inheritable(handle, False)
    if message["recovers"]:
        link.install(link.Link(channel, Path(message["folder"]), Journal(files[0])))
    try:
        _run(message["arguments"])
    except Exception as error:
        text = f"{type(error).__name__}: {_first_line(error)}"
        channel.send("failed", error=text, step=None, final=isinstance(error, UserError))
        raise


def _die_with_parent(parent: int) -> None:
    """Be killed when the agent ends, however it does."""
    libc: Any = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was over before the kernel was asked
        os._exit(1)


def _run(arguments: list[str]) -> None:
    """Run a script as `python script.py args..` does."""
    script = arguments[0]
    sys.argv = list(arguments)
    sys.path[0] = str(Path(script).resolve().parent)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=script, __builtins__=builtins)
    sys.modules["__main__"] = module
    exec(compile(Path(script).read_bytes(), script, "exec"), module.__dict__)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:500]


if __name__ == "__main__":
    main()
