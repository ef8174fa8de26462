"""Hosts of a run of its own on this machine, and what is done to them; needs namespaces.

    unshare --map-root-user --net --mount python hosts.py FOLDER RESULT SCRIPT ARGS..

Each host has a network, processes and names of its own, and finds its own name at 127.0.1.1, as on
Debian. SCRIPT runs under `msc run` on two of them, and a third one waits. A fault is done when
FOLDER has a file `WHAT@HOST`, which is then removed: "dies" is a power loss, of which nobody is
told, "boots" starts such a host anew, "cut" takes one off the network, and "plug" puts it back.
What the agents print goes to FOLDER/RESULT.HOST.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

COUNT = 3
FAULTS = ("dies", "boots", "cut", "plug")
PORT = 29400
_ENTER = """
set -e
read go
hostname "host$N"
ip link set lo up
for name in hosts resolv.conf; do
    mount --bind "$FOLDER/$name.$N" /etc/$name
done
exec "$@"
"""


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def run(*words: str) -> None:
    subprocess.run(words, check=True)


class Host:
    """Runs a command; other hosts reach it at `address` of its number."""

    def __init__(self, folder: Path, number: int, out: Path, command: list[str]) -> None:
        self.number = number
        others = [f"{address(n)} host{n}" for n in range(COUNT) if n != number]
        lines = ["127.0.0.1 localhost", f"127.0.1.1 host{number}", *others]
        (folder / f"hosts.{number}").write_text("\n".join(lines) + "\n")
        (folder / f"resolv.conf.{number}").write_text("nameserver 127.0.0.1\n")  # refuses at once
        spaces = ["--net", "--uts", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
        environment = {**os.environ, "N": str(number), "FOLDER": str(folder)}
        with out.open("a") as file:
            self.process = subprocess.Popen(
                ["unshare", *spaces, "sh", "-c", _ENTER, "sh", *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
            )
        pid = str(self.process.pid)
        while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            time.sleep(0.01)
        card = ["name", "eth0", "address", f"02:00:00:00:00:0{number}", "netns", pid]
        run("ip", "link", "add", f"v{number}", "type", "veth", "peer", *card)
        run("ip", "link", "set", f"v{number}", "master", "switch", "up")
        inside = ["nsenter", "-t", pid, "--net", "ip"]
        run(*inside, "addr", "add", f"{address(number)}/24", "dev", "eth0")
        run(*inside, "link", "set", "eth0", "up")
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.close()

    def suffer(self, what: str) -> None:
        """A fault."""
        run("ip", "link", "set", f"v{self.number}", "up" if what == "plug" else "down")
        if what == "dies":
            self.process.send_signal(signal.SIGKILL)  # and with it all processes of the host
            self.process.wait()
            run("ip", "link", "del", f"v{self.number}")


def main() -> None:
    folder, result = Path(sys.argv[1]), sys.argv[2]
    run("ip", "link", "add", "switch", "type", "bridge")
    run("ip", "link", "set", "switch", "up")

    def start(number: int) -> Host:
        command = [sys.executable, "-m", "msc", "run", "--nnodes", "2", "--nproc", "1"]
        command += ["--node-rank", str(number), "--rdzv", f"host0:{PORT}", "--spares", "1"]
        command += ["--run", str(folder / f"{result}.run{number}"), *sys.argv[3:]]
        return Host(folder, number, folder / f"{result}.{number}", command)

    hosts = [start(number) for number in range(COUNT)]
    while any(host.process.poll() is None for host in hosts):
        for number, what in itertools.product(range(COUNT), FAULTS):
            told = folder / f"{what}@{number}"
            if told.exists():
                if what == "boots":
                    hosts[number] = start(number)
                else:
                    hosts[number].suffer(what)
                told.unlink()
        time.sleep(0.02)
    codes = [host.process.returncode for host in hosts]
    sys.exit(f"exit codes {codes}" if any(codes) else 0)


if __name__ == "__main__":
    main()
