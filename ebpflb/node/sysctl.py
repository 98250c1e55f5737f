# SPDX-License-Identifier: Apache-2.0
"""Where the sysctls of this network namespace are written.

A container sees /proc/sys read-only, and no mount below /proc is granted to it; so deploy/chart
mounts the host's /proc/sys/net once more, under HOST. Whoever opens a file below it is given that
of its own network namespace, wherever the mount was made.
"""

from pathlib import Path

OWN = Path("/proc/sys")
HOST = Path("/host/proc/sys")


def path(name: str) -> Path:
    """The file of a sysctl such as "net/ipv4/ip_forward"; it need not exist."""
    mounted = HOST / name
    return mounted if mounted.exists() else OWN / name
