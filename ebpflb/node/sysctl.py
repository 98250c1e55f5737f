# SPDX-License-Identifier: Apache-2.0
"""Where the sysctls of this network namespace are written.

In a container /proc/sys is read-only, and nothing can be mounted below /proc; so deploy/chart
mounts the host's /proc/sys/net once more, at HOST. A process that opens a file below it gets the
file of its own network namespace, wherever the mount was made.
"""

from pathlib import Path

OWN_PROC_SYS = Path("/proc/sys")
HOST = Path("/host/proc/sys")


def path(name: str) -> Path:
    """The file of a sysctl such as "net/ipv4/ip_forward"; it need not exist."""
    mounted = HOST / name
    return mounted if mounted.exists() else OWN_PROC_SYS / name
