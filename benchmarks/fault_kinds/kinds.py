"""The table of faults: what each does, in which run, and what must come of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Expected(Enum):
    """What must come of a fault."""

    RECOVERS = "the run is brought back"
    GOES_ON = "the run goes on; no rank is given up"
    RESUMES = "the next start goes on from storage"
    ENDS = "the run ends, with the cause named"
    REFUSED = "found, and an intact checkpoint taken"


@dataclass(frozen=True)
class Kind:
    """A fault.

    run: the name of the run in which it is made (`runs.py`), "saved" for one that is made in saved
    files. says: what one of the lines that follow it must match, a regular expression; "" where
    there is nothing to tell. late: that may come after the next fault, and names the step. ranks:
    how many ranks it happens to. own: the rank it must be, None for a random one. chained: it
    happens while the fault before is being mended. room: steps until the next fault. changes: until
    it is found, steps come to other losses, which is told when they are repeated. snapshots: how
    many intervals between snapshots may be lost.
    """

    name: str
    what: str
    run: str
    expected: Expected
    says: str = ""
    ranks: int = 1
    own: int | None = None
    chained: bool = False
    room: int = 7
    changes: bool = False
    snapshots: int = 1
    late: bool = False


KILLED = r"was killed \(SIGKILL\)"
RECOVERS, GOES_ON, RESUMES = Expected.RECOVERS, Expected.GOES_ON, Expected.RESUMES
ENDS, REFUSED = Expected.ENDS, Expected.REFUSED

KINDS = (
    # one rank or several, dp=2,tp=2
    Kind("kill", "a rank is killed at a random moment of a step", "ranks", RECOVERS, KILLED),
    Kind("kill-rank-0", "the same, of rank 0", "ranks", RECOVERS, KILLED, own=0),
    Kind("kill-two", "two ranks are killed in one step", "ranks", RECOVERS, KILLED, 2),
    Kind("freeze", "a rank is stopped by SIGSTOP", "ranks", RECOVERS, r"is frozen"),
    Kind(
        "exception",
        "the forward of a rank raises",
        "ranks",
        RECOVERS,
        r"raised ValueError: on purpose",
    ),
    Kind("early-exit", "a rank ends with code 0", "ranks", RECOVERS, r"ended with exit code 0"),
    Kind(
        "held-gil", "C code holds the interpreter's lock", "ranks", RECOVERS, r"computes, or hangs"
    ),
    Kind("live-lock", "a rank computes for ever", "ranks", RECOVERS, r"computes, or hangs"),
    Kind("segfault", "a rank reads memory that is not there", "ranks", RECOVERS, r"SIGSEGV"),
    Kind("abort", "a rank aborts", "ranks", RECOVERS, r"SIGABRT"),
    Kind(
        "no-memory",
        "an allocation of a rank fails (RLIMIT_AS)",
        "ranks",
        RECOVERS,
        r"raised RuntimeError: .*can't allocate memory",
    ),
    Kind(
        "memory-kill",
        "a rank takes memory until it is killed, as the kernel would (by SIGKILL)",
        "ranks",
        RECOVERS,
        KILLED,
    ),
    Kind(
        "nan",
        "a value of a rank is NaN in one step",
        "ranks",
        GOES_ON,
        r"came out otherwise when it was repeated, on ranks",
    ),
    Kind(
        "flipped-replica",
        "a bit of a parameter of which others have copies flips in a rank",
        "ranks",
        RECOVERS,
        r"raised TrainingError: .*copies of the state differ: .*: rank",
        changes=True,
    ),
    Kind(
        "flipped-snapshot",
        "a bit of a rank's newest copy in memory flips, then another rank is killed",
        "ranks",
        RECOVERS,
        r"the copy of step \d+ in memory is damaged and not used",
        snapshots=2,
    ),
    Kind(
        "reader-death",
        "the process that reads a rank's data is killed",
        "ranks",
        RECOVERS,
        r"raised EOFError: the reader of the data",
    ),
    Kind("reader-stall", "a rank's data takes 4 s", "ranks", GOES_ON),
    Kind(
        "writer-death",
        "the process that writes a rank's checkpoint is killed with a save in hand",
        "ranks",
        GOES_ON,
        r"process that writes checkpoints died \(exit code -9\); started again",
    ),
    Kind(
        "zombie-rank",
        "a copy of a killed rank's process wakes up after its eviction: tries to join, to speak, "
        "to commit",
        "ranks",
        RECOVERS,
        r"zombie of step {step}: could do nothing",
        late=True,
    ),
    Kind(
        "zombie-writer",
        "the writer of a killed rank is stopped before and wakes up after the eviction",
        "ranks",
        RECOVERS,
        KILLED,
    ),
    Kind("standby-death", "the standby dies before it is used", "ranks", GOES_ON, r"standby ended"),
    Kind("agent-freeze", "the agent is stopped for 4 s", "ranks", GOES_ON),
    Kind(
        "connections-reset",
        "all connections of a rank's groups are shut",
        "ranks",
        RECOVERS,
        r"lost a connection",
    ),
    # start and storage, pp=2
    Kind("kill-all", "all ranks are killed in one step", "pipeline", RECOVERS, KILLED, 2),
    Kind(
        "kill-in-connect",
        "a replacement is killed when it has connected and has no group yet",
        "pipeline",
        RECOVERS,
        KILLED,
        chained=True,
    ),
    Kind(
        "kill-in-groups",
        "the next is killed while it makes its groups",
        "pipeline",
        RECOVERS,
        KILLED,
        chained=True,
    ),
    Kind(
        "kill-at-first",
        "the next is killed before its first collective",
        "pipeline",
        RECOVERS,
        KILLED,
        chained=True,
    ),
    Kind(
        "disk-error",
        "writes fail with EIO (an fsspec file system)",
        "pipeline",
        GOES_ON,
        r"was not saved: .*Input/output error.*; training goes on",
        own=0,
    ),
    Kind(
        "disk-stall",
        "writes stand still for three saves (an fsspec file system)",
        "pipeline",
        GOES_ON,
        r"is skipped: both copies are being written",
        own=0,
        room=14,
    ),
    Kind(
        "agent-death",
        "the agent is killed, and the store with it; the newest checkpoint is flipped by a bit "
        "before the next start",
        "pipeline",
        RESUMES,
        r"resumed from step",
    ),
    Kind(
        "kill-at-start",
        "a rank is killed before any group is made",
        "pipeline",
        RECOVERS,
        KILLED,
        chained=True,
    ),
    # a machine of its own: namespaces of network and mounts, pp=2
    Kind(
        "cut-both-ways",
        "all packets between two ranks are lost for 5 s",
        "machine",
        RECOVERS,
        r"lost a connection|waits in a ring|waits for a message",
        room=25,
    ),
    Kind(
        "cut-one-way",
        "those in one direction, of the connections that there are",
        "machine",
        RECOVERS,
        r"lost a connection|waits in a ring|waits for a message",
        room=25,
    ),
    Kind(
        "slow-link",
        "packets between two ranks are lost for 0.3 s, three times in 3 s",
        "machine",
        GOES_ON,
        room=40,
    ),
    Kind(
        "dns-stall",
        "no look-up of a name is answered (1 s each) while the ranks meet again",
        "machine",
        RECOVERS,
        r"lost a connection",
    ),
    Kind(
        "store-cut",
        "a rank's connection to the store is shut",
        "machine",
        GOES_ON,
    ),
    Kind(
        "disk-full",
        "the disk is full (ENOSPC, a tmpfs)",
        "machine",
        GOES_ON,
        r"was not saved: .*No space left on device.*; training goes on",
        own=0,
    ),
    Kind(
        "read-only",
        "the disk is remounted read-only",
        "machine",
        GOES_ON,
        r"was not saved: .*Read-only file system.*; training goes on",
        own=0,
    ),
    Kind(
        "quota",
        "files may not grow any more (RLIMIT_FSIZE of the writer)",
        "machine",
        GOES_ON,
        r"was not saved: .*File too large.*; training goes on",
        own=0,
    ),
    Kind(
        "log-full",
        "the disk with the run's folder is full, and a rank is killed",
        "machine",
        RECOVERS,
        KILLED,
    ),
    Kind("monitor-death", "the monitor is killed and started again", "ranks", GOES_ON),
    # faults of the program
    Kind(
        "wrong-order",
        "a rank has a collective more than its program, every time",
        "order",
        ENDS,
        r"runs another program",
    ),
    Kind(
        "no-send",
        "a stage leaves out a message, every time",
        "send",
        ENDS,
        r"runs another program|computes",
    ),
    # saved files
    Kind("writers-at-bytes", "writers are killed at 200 random bytes each", "saved", REFUSED),
    Kind("flipped-data", "a bit of a data file", "saved", REFUSED),
    Kind("flipped-record", "a bit of a rank's record", "saved", REFUSED),
    Kind("flipped-commit", "a bit of the commit record", "saved", REFUSED),
    Kind("cut-file", "a data file without its last byte", "saved", REFUSED),
    Kind("missing-file", "a data file is missing", "saved", REFUSED),
    Kind("swapped-files", "data files of two ranks are swapped", "saved", REFUSED),
    Kind("other-step", "a data file and its record are those of another step", "saved", REFUSED),
    Kind(
        "other-attempt",
        "a data file and its record are those of another save of the step",
        "saved",
        REFUSED,
    ),
    Kind("no-commit", "all is written but the commit record", "saved", REFUSED),
)

NAMES = {kind.name: kind for kind in KINDS}

NOT_MADE = {
    "the kernel's kill for want of memory": "a limit for one process alone takes a cgroup, which "
    "is the machine's; memory-kill sends the signal that the kernel would",
    "a link with a constant delay": "it takes a queueing discipline that not every kernel has; "
    "slow-link loses packets for a while, which TCP sends again",
    "clock skew between ranks": "all ranks of one machine have its clock",
    "the loss of one node of several": "tests/recovery/test_nodes.py makes it, with several agents "
    "on one host; agent-death is the loss of the only node",
    "fewer ranks than before": "that does not keep the layout; see tests/recovery/test_growth.py",
    "a standby of another version of the program": "all processes are started from one tree",
    "flips that all copies have alike": "a gradient that is wrong before it is reduced, or a "
    "parameter without a copy, is not found; msc.Guard says so",
}
"""Faults of the list that this campaign does not make, or that are not found, and why."""
