# SPDX-License-Identifier: Apache-2.0
"""A network namespace, and what one does in it: devices, routes, switches, packet filters."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from ebpflb.errors import NodeError

NETNS = Path("/run/netns")


def ip(*words: str) -> None:
    """Runs ip(8). Raises NodeError with its words."""
    _run(["ip", *words])


@dataclass(frozen=True)
class Namespace:
    """Known to ip(8) by its name."""

    netns: str

    def create(self) -> None:
        """With loopback up. Addresses can be used at once: nobody else could have them."""
        ip("netns", "add", self.netns)
        self.sysctl("net.ipv6.conf.default.accept_dad", 0)
        self.ip("link set lo up")

    def ip(self, *lines: str, v6: bool = False) -> None:
        """Commands of ip(8), all in one process. Raises NodeError with its words.

        Without ``v6`` those that name no address are about IPv4.
        """
        family = ["-6"] if v6 else []
        _run(["ip", *family, "-n", self.netns, "-batch", "-"], "\n".join(lines) + "\n")

    def nft(self, rules: str) -> None:
        """Loads rules. Raises NodeError with the words of nft(8)."""
        _run([*self.enter, "nft", "-f", "-"], rules)

    def sysctl(self, name: str, value: object) -> None:
        """Sets one, by its dotted name; a dot in a device's name is a slash."""
        path = name.translate(str.maketrans("./", "/."))
        _run([*self.enter, "tee", f"/proc/sys/{path}"], str(value))

    @property
    def enter(self) -> list[str]:
        """The words before a command that is to run in it."""
        return ["nsenter", f"--net={NETNS / self.netns}", "--"]


def _run(command: list[str], said: str = "") -> None:
    done = subprocess.run(command, input=said, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NodeError(f"{' '.join(command)}: {done.stderr.strip()}\n{said}".strip())
