"""Machines on one computer: network namespaces on a switch, whose wires can be cut, pulled and made
slow. Needs root.

    with Network("w1", "w2", slow={"w2"}) as network:
        network.cut("w1", HERE)          # silently: both send to a station that is not there
        network.delay("w2", ms=200)      # of a machine in `slow`
        network.popen("w1", [...])       # a process on that machine

`HERE` is this computer's own namespace, which is a machine of its own on the switch.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = "here"
#: A station's address that nobody has.
NOBODY = "02:00:00:00:00:01"
WIRE = Path(__file__).with_name("slow_wire.py")


def why_not() -> str:
    """Why there can be no machines; empty: there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` command (iproute2)"
    name = f"mt{os.getpid()}"
    tried = subprocess.run(
        ["ip", "netns", "add", name], capture_output=True, text=True, check=False
    )
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return (
        f"no network namespace can be made here: {tried.stderr.strip()}" if tried.returncode else ""
    )


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Network:
    """The machines `names` and `HERE`, each with an address that all others reach until a wire is
    cut.
    """

    def __init__(self, *names: str, slow: set[str] = frozenset()):  # type: ignore[assignment]
        self.names = (HERE, *names)
        self._slow = slow
        number = os.getpid() % 16384
        self._prefix = f"mm{number:x}"
        self._net = f"10.{128 + number // 256}.{number % 256}"
        self._switch = f"{self._prefix}-switch"
        self._wires: dict[str, subprocess.Popen[bytes]] = {}
        self._cut: set[tuple[str, str]] = set()

    def address(self, name: str) -> str:
        return f"{self._net}.{self.names.index(name) + 10}"

    def namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _at(self, name: str) -> tuple[str, ...]:
        return () if name == HERE else ("-n", self.namespace(name))

    def device(self, name: str) -> str:
        """The name of its interface to the switch."""
        return f"{self._prefix}{self.names.index(name)}"

    def __enter__(self) -> "Network":
        try:
            ip("netns", "add", self._switch)
            ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", self._switch, "link", "set", "bridge", "up")
            for name in self.names:
                self._plug_in(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _plug_in(self, name: str) -> None:
        device = self.device(name)
        port = f"port{self.names.index(name)}"
        if name != HERE:
            ip("netns", "add", self.namespace(name))
            ip(*self._at(name), "link", "set", "lo", "up")
        if name in self._slow:
            command = [sys.executable, str(WIRE), self.namespace(name), device, self._switch, port]
            self._wires[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert self._wires[name].stdout.readline() == b"ready\n"  # type: ignore[union-attr]
        else:
            ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", device)
            ip(
                "-n",
                self._switch,
                "link",
                "set",
                device,
                "netns",
                str(os.getpid()) if name == HERE else self.namespace(name),
            )
        ip("-n", self._switch, "link", "set", port, "master", "bridge")
        ip("-n", self._switch, "link", "set", port, "up")
        ip(*self._at(name), "address", "add", f"{self.address(name)}/24", "dev", device)
        ip(*self._at(name), "link", "set", device, "up")

    def close(self) -> None:
        for wire in self._wires.values():
            wire.kill()
            wire.wait()
        for command in (
            ["link", "delete", self.device(HERE)],
            *(["netns", "delete", self.namespace(name)] for name in self.names[1:]),
            ["netns", "delete", self._switch],
        ):
            subprocess.run(["ip", *command], capture_output=True, check=False)

    # What happens to machines

    def cut(self, one: str, *others: str) -> None:
        """From now on nothing passes between `one` and each of `others` (all: none named), and
        nobody is told.
        """
        for other in others or self.names:
            if other != one:
                self._cut.add((one, other))
                for here, there in ((one, other), (other, one)):
                    at = ("dev", self.device(here), "nud", "permanent")
                    ip(
                        *self._at(here),
                        "neighbour",
                        "replace",
                        self.address(there),
                        "lladdr",
                        NOBODY,
                        *at,
                    )

    def heal(self) -> None:
        """Undo every cut."""
        for pair in self._cut:
            for here, there in (pair, pair[::-1]):
                ip(
                    *self._at(here),
                    "neighbour",
                    "flush",
                    "to",
                    self.address(there),
                    "dev",
                    self.device(here),
                    "nud",
                    "permanent",
                )
        self._cut.clear()

    def pull(self, name: str) -> None:
        """Unplug its wire at the switch: the kernels at both ends know."""
        ip("-n", self._switch, "link", "set", f"port{self.names.index(name)}", "down")

    def plug(self, name: str) -> None:
        ip("-n", self._switch, "link", "set", f"port{self.names.index(name)}", "up")

    def delay(self, name: str, ms: float = 0.0, loss: float = 0.0) -> None:
        """From now on each frame to and from a machine in `slow` takes `ms` longer, and `loss` (0
        to 1) of them are lost.
        """
        wire = self._wires[name].stdin
        wire.write(f"{ms / 1000} {loss}\n".encode())
        wire.flush()
        time.sleep(0.05)

    def inside(self, name: str) -> list[str]:
        """What to put before a command to run it on that machine."""
        return [] if name == HERE else ["ip", "netns", "exec", self.namespace(name)]

    def popen(self, name: str, command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([*self.inside(name), *command], **options)
