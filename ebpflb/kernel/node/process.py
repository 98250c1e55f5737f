# SPDX-License-Identifier: Apache-2.0
"""This process: its capabilities, its clock, its OOM score and its file limit.

bpf(2) and netlink need these capabilities (capabilities(7)):

    CAP_BPF         maps, and loading programs (5.8)
    CAP_NET_ADMIN   attaching to sockets and devices, network sysctls, ending sockets
    CAP_PERFMON     the verifier lets a program compute with pointers, as ours do (5.8)

The kernel accepts CAP_SYS_ADMIN for the first and the last. deploy/ grants only the capabilities
listed here and in values.yaml; they may be granted to any user.
"""

import logging
import posixpath
import resource
from pathlib import Path

log = logging.getLogger(__name__)

CAPABILITIES = {
    "CAP_NET_ADMIN": 12,
    "CAP_NET_RAW": 13,
    "CAP_SYS_ADMIN": 21,
    "CAP_SYS_RESOURCE": 24,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}
NEEDED_CAPABILITIES = ("CAP_BPF", "CAP_NET_ADMIN", "CAP_PERFMON")
OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")

_STATUS = Path("/proc/self/status")
_CLOCKS = Path("/proc/self/timens_offsets")  # missing if the kernel has no time namespaces
_PROCESSES = Path("/proc")
_MACHINES_PIDS = 0xEFFFFFFC  # PROC_PID_INIT_INO
_IMPLIED = {"CAP_BPF", "CAP_PERFMON"}  # by CAP_SYS_ADMIN


def capabilities(status: str | None = None) -> set[str]:
    """Return the effective capabilities among CAPABILITIES.

    ``status``: text of /proc/PID/status.
    """
    lines = (status or _STATUS.read_text()).splitlines()
    (mask,) = (int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    found = {name for name, number in CAPABILITIES.items() if mask >> number & 1}
    return found | _IMPLIED if "CAP_SYS_ADMIN" in found else found


def missing_capabilities(status: str | None = None) -> list[str]:
    """Return the needed capabilities that this process does not have."""
    held = capabilities(status)
    return [name for name in NEEDED_CAPABILITIES if name not in held]


def clock_shift(clocks: Path = _CLOCKS) -> float:
    """Return the seconds by which CLOCK_MONOTONIC is ahead of the machine's.

    See time_namespaces(7).
    """
    lines = clocks.read_text().splitlines() if clocks.exists() else ()
    for name, seconds, nanoseconds in map(str.split, lines):
        if name == "monotonic":
            return int(seconds) + int(nanoseconds) / 1e9
    return 0.0


def sees_the_machine(processes: Path = _PROCESSES) -> bool:
    """Whether /proc shows the node's processes, and not only those of a container or pod.

    A node can be a container itself, such as kind's: there the first process is not of the pod of
    this one. The cgroups of a pod's containers have one parent.
    """
    own = processes / "self"
    if (own / "ns/pid").stat().st_ino == _MACHINES_PIDS:
        return True
    return _pod_cgroup(own) != _pod_cgroup(processes / "1")


def _pod_cgroup(process: Path) -> str:
    """Return the parent of the process's cgroup v2, as seen from this cgroup namespace."""
    lines = (process / "cgroup").read_text().splitlines()
    found = next((line[3:] for line in lines if line.startswith("0::")), "/")
    return posixpath.normpath(posixpath.join(found.lstrip("/"), ".."))


def adjust_oom_score(value: int, path: Path = OOM_SCORE_ADJ) -> None:
    """Set how early this process is killed when memory is short: from -1000, never, to 1000.

    If this is not allowed (a lower value needs CAP_SYS_RESOURCE) it is only logged, as in
    kube-proxy.
    """
    try:
        if int(path.read_text()) != value:
            path.write_text(f"{value}\n")
    except OSError as error:
        log.info("oom_score_adj: not set to %d: %s", value, error.strerror)


def raise_file_limit() -> None:
    """Allow as many open files as possible, as programs in Go do.

    Each health-check NodePort has a socket for each family, and the soft limit of systemd and
    containerd is 1024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.info("RLIMIT_NOFILE: left at %d: %s", soft, error)
