# SPDX-License-Identifier: Apache-2.0
"""A network namespace: its devices, routes, sysctls and packet filters."""

from dataclasses import dataclass
from pathlib import Path

from ebpflb.kernel.netfilter.firewall import run

NETNS = Path("/run/netns")


def ip(*words: str) -> None:
    """Run ip(8). Raises NodeError with its message."""
    run(["ip", *words])


def within(cgroup: Path) -> list[str]:
    """Return the command prefix that enters a cgroup; without it the command is not run.

    A shell enters it, because a signal during a ``preexec_fn`` would be lost.
    """
    return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(cgroup / "cgroup.procs")]


@dataclass(frozen=True)
class Namespace:
    """A network namespace with a name that ip(8) knows."""

    netns: str

    def create(self, cgroup: Path | None = None) -> None:
        """Create the namespace with loopback up, and without duplicate address detection.

        It is created from ``cgroup``, if given.
        """
        run([*(within(cgroup) if cgroup else ()), "ip", "netns", "add", self.netns])
        self.sysctl("net.ipv6.conf.default.accept_dad", 0)
        self.ip("link set lo up")

    def ip(self, *lines: str, v6: bool = False) -> None:
        """Run commands of ip(8) in one process. Raises NodeError with its message.

        Unless ``v6`` is set, commands without an address are about IPv4.
        """
        family = ["-6"] if v6 else []
        run(["ip", *family, "-n", self.netns, "-batch", "-"], "\n".join(lines) + "\n")

    def connect(self, addresses: tuple[str, str], gateways: tuple[str, str]) -> None:
        """Give eth0 an address of each family, IPv4 first, and a default route."""
        for address, gateway, length in zip(addresses, gateways, (24, 64), strict=True):
            own, route = f"address add {address}/{length}", f"route add default via {gateway}"
            self.ip(f"{own} dev eth0", f"{route} dev eth0")

    def nft(self, rules: str) -> None:
        """Load rules. Raises NodeError with the message of nft(8)."""
        run([*self.enter, "nft", "-f", "-"], rules)

    def sysctl(self, name: str, value: object) -> None:
        """Set a sysctl by its dotted name; a dot in a device's name is written as a slash."""
        path = name.translate(str.maketrans("./", "/."))
        run([*self.enter, "tee", f"/proc/sys/{path}"], str(value))

    @property
    def enter(self) -> list[str]:
        """Return the command prefix that enters the namespace."""
        return ["nsenter", f"--net={NETNS / self.netns}", "--"]
