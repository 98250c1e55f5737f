# SPDX-License-Identifier: Apache-2.0
"""Whether this node can run ebpflb: each feature that it uses, and what is lost without it.

Every feature is tried; nothing is derived from the kernel's version. Only whether a CPU can
interleave packets is read from the kernel's configuration.
"""

import gzip
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ebpflb import files
from ebpflb.errors import EbpflbError, NodeError
from ebpflb.kernel import probe
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.netfilter.probe import left_answers, netfilter_obstacle
from ebpflb.kernel.node import device_watch, namespaces, sock_diag
from ebpflb.kernel.node.sysctls import bridge_calls
from ebpflb.model import packet_path
from ebpflb.model.services import Protocol
from ebpflb.options import Paths
from ebpflb.tools import neighbours, node_checks

_BRIDGES = "bridges of pods"
_BY_FLOWS = "packets are translated by ebpflb's own flow tables"


def check_node(paths: Paths, cgroup: Path | None) -> list[node_checks.CheckResult]:
    """Return the results of all checks; if the capabilities or bpf(2) are missing, only of the
    checks that need neither.
    """
    results = node_checks.required_results(paths.state, cgroup)
    if node_checks.missing_requirements(results[:2]):
        return results
    netfilter = _netfilter(paths.answers_file)
    others = neighbours.results(paths.state, cgroup)
    return [
        *results,
        *_optional(),
        netfilter,
        _bridged_pods(),
        *_stale_sockets(),
        *_processes(paths.state, cgroup),
        *others,
    ]


def _processes(state: Path, cgroup: Path | None) -> Iterator[node_checks.CheckResult]:
    """Yield the processes outside the cgroup, if there is such a cgroup; None: the hooks' one."""
    with suppress(NodeError, ValueError):
        where = cgroup_links.cgroup_of(StateDir(state))
        if cgroup:
            root = cgroup_links.cgroup_root()
            where = Path("/") / cgroup_links.cgroup_root(cgroup).relative_to(root)
        yield node_checks.processes(where)


def _optional() -> Iterator[node_checks.CheckResult]:
    """Yield results about features that ebpflb can do without."""
    lost = "connections are refused over loopback; bind() to a NodePort succeeds"
    yield node_checks.feature("errno from hooks", probe.set_retval(), "5.18", lost)
    lost = "each packet reads the exact clock, which is slower"
    yield node_checks.feature("coarse clock", probe.coarse_clock(), "5.11", lost)
    lost = "the flow tables masquerade to the device's own address, whatever the route says"
    yield node_checks.feature("source of a route", probe.route_source(), "6.7", lost)
    lost = "a program attached briefly at the start reads it"
    yield node_checks.feature("SO_NETNS_COOKIE", namespaces.own_cookie() is not None, "5.14", lost)
    yield _one_packet_a_cpu()


REALTIME = Path("/sys/kernel/realtime")
CONFIGS = ("/proc/config.gz", "/boot/config-{}", "/lib/modules/{}/config")
_BH_LOCK = "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK"


def _one_packet_a_cpu() -> node_checks.CheckResult:
    """Return whether the kernel handles one packet at a time on a CPU.

    A program keeps its data about a packet in map `scratch`, which has one element for each CPU.
    The kernel runs these programs with softirqs disabled, so no other program starts on the same
    CPU before it has ended. With PREEMPT_RT this needs a lock, which is optional since 6.18.
    """
    detail, config = "yes", _kernel_config() if files.says_one(REALTIME) else ""
    if config is None:
        detail = f"unknown: a PREEMPT_RT kernel whose configuration is not readable ({_BH_LOCK})"
    elif f"# {_BH_LOCK} is not set" in config.splitlines():
        detail = f"no: PREEMPT_RT without {_BH_LOCK}"
    lost = "packets may be translated with the data of another one: use a kernel that has this lock"
    return node_checks.judged("one packet a CPU", detail == "yes", detail, lost)


def _kernel_config() -> str | None:
    """Return the running kernel's configuration, or None if it cannot be read."""
    for name in CONFIGS:
        path = Path(name.format(os.uname().release))
        with suppress(OSError):
            found = path.read_bytes()
            return (gzip.decompress(found) if path.suffix == ".gz" else found).decode()
    return None


def _netfilter(answers: Path) -> node_checks.CheckResult:
    """Return whether the kernel allows --packet-path=auto to use netfilter."""
    left = left_answers(answers)
    missing = left.netfilter if left else netfilter_obstacle()
    return node_checks.judged("NAT by nftables", not missing, missing or "yes", _BY_FLOWS)


def _bridged_pods() -> node_checks.CheckResult:
    """Return whether --packet-path=auto uses the flow tables because of bridges (bridged_pods)."""
    try:
        found = packet_path.unsuited(device_watch.list_devices().devices, (), bridge_calls())
    except EbpflbError as error:
        return node_checks.CheckResult(_BRIDGES, node_checks.WARNING, str(error))
    return node_checks.judged(_BRIDGES, not found, found or "none bypasses netfilter", _BY_FLOWS)


def _stale_sockets() -> Iterator[node_checks.CheckResult]:
    """Yield whether sockets of removed endpoints can be ended (kube-proxy.md 11.1, on-removal)."""
    lost = "connected UDP sockets keep a removed endpoint (modprobe udp_diag)"
    yield node_checks.feature(
        "destroying UDP sockets", sock_diag.can_destroy(), "4.9, INET_DIAG_DESTROY", lost
    )
    lost = "with on-removal: reset, TCP sockets keep a removed endpoint (modprobe tcp_diag)"
    ends_tcp = sock_diag.can_destroy(Protocol.TCP)
    yield node_checks.feature("destroying TCP sockets", ends_tcp, "4.5, INET_DIAG_DESTROY", lost)
    can_enter = "CAP_SYS_ADMIN" in namespaces.capabilities()
    detail = "yes" if can_enter else "no (needs CAP_SYS_ADMIN)"
    lost = "connected UDP sockets of pods keep a removed backend"
    yield node_checks.judged("listing pods' UDP sockets", can_enter, detail, lost)
