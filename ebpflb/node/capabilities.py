# SPDX-License-Identifier: Apache-2.0
"""What this process may do: the capabilities that bpf(2) and netlink ask for (capabilities(7)).

    CAP_BPF         maps, and loading programs (5.8)
    CAP_NET_ADMIN   programs at sockets and devices, filters, sysctls of the network, ending sockets
    CAP_PERFMON     the verifier lets a program compute with pointers, as ours do (5.8)

The kernel takes CAP_SYS_ADMIN for the first and the last. deploy/ grants no more than is here and
in values.yaml; which user they are granted to does not matter.
"""

from pathlib import Path

NUMBERS = {
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}
NEEDED = ("CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON")

_STATUS = Path("/proc/self/status")
_IMPLIED = {"CAP_BPF", "CAP_PERFMON"}  # by CAP_SYS_ADMIN


def held(status: str | None = None) -> set[str]:
    """The effective ones of those in NUMBERS; ``status`` is the text of /proc/PID/status."""
    lines = (status or _STATUS.read_text()).splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    found = {name for name, number in NUMBERS.items() if mask >> number & 1}
    return found | _IMPLIED if "CAP_SYS_ADMIN" in found else found


def missing(status: str | None = None) -> list[str]:
    """The needed ones that this process has not."""
    there = held(status)
    return [name for name in NEEDED if name not in there]
