"""`python -m msc` is the command `msc`."""

from __future__ import annotations

from msc.cli import main

if __name__ == "__main__":
    main()
