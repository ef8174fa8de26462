"""The environment variables that MSC reads, each with one sentence.

`msc.compile` takes the same settings as arguments; an argument wins over the environment.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Flag:
    """One environment variable; `help` is its sentence in the documentation."""

    name: str
    help: str

    @property
    def text(self) -> str:
        """Its value, stripped; the empty string if it is not set."""
        return os.environ.get(self.name, "").strip()

    @property
    def on(self) -> bool:
        """Whether it is set to anything but `0`."""
        return self.text not in ("", "0")

    @property
    def names(self) -> tuple[str, ...]:
        """Its value as a list with commas."""
        return tuple(filter(None, (part.strip() for part in self.text.split(","))))


DUMP = Flag("MSC_DUMP", "Folder for one numbered text file per pass that changed something.")
LOG = Flag("MSC_LOG", "1 prints one line per pass to stderr: changes, nodes and CPU time.")
STOP_AFTER = Flag("MSC_STOP_AFTER", "Name of the pass after which compilation stops.")
SKIP = Flag("MSC_SKIP", "Names of passes to leave out, with commas between them.")
TRITON = Flag(
    "MSC_TRITON",
    "Where Triton kernels run: interpret, in its interpreter on the CPU; all, on CUDA also where "
    "its own library is preferred; off, nowhere.",
)
FULL_WORLD_SIZE = Flag(
    "MSC_FULL_WORLD_SIZE",
    "How many ranks the job was started for, where it runs on fewer; the agent sets it for dp=*.",
)

FLAGS = (DUMP, LOG, STOP_AFTER, SKIP, TRITON, FULL_WORLD_SIZE)
