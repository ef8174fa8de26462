"""The command `msc`, and `python -m msc`.

What must start at once, on a machine that has failed, does not wait for the compiler's imports.
"""

from __future__ import annotations

import importlib
import sys

_AT_ONCE = {"doctor": "msc.doctor"}


def main() -> None:
    """The entry point of the command; exits the process."""
    module = _AT_ONCE.get(sys.argv[1] if len(sys.argv) > 1 else "")
    if module is not None:
        del sys.argv[1]
    importlib.import_module(module or "msc.cli").main()


if __name__ == "__main__":
    main()
