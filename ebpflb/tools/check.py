# SPDX-License-Identifier: Apache-2.0
"""Whether this node can run ebpflb: each feature that it uses, and what is lost without it.

Every feature is tried; nothing is derived from the kernel's version. Only whether a CPU can
interleave packets is read from the kernel's configuration.
"""

import gzip
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from ebpflb import files
from ebpflb.errors import EbpflbError, NodeError, in_words
from ebpflb.files import DOCS
from ebpflb.kernel import probe
from ebpflb.kernel.attach import cgroup_links, device_programs
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.netfilter import flowtable, nft
from ebpflb.kernel.netfilter.each_packet import marked_routes
from ebpflb.kernel.netfilter.probe import left_answers, netfilter_obstacle
from ebpflb.kernel.node import device_watch, namespaces, sock_diag
from ebpflb.kernel.node.kube_proxy import ipvs_state
from ebpflb.kernel.node.sysctls import bridge_calls
from ebpflb.model import packet_path
from ebpflb.model.services import Protocol
from ebpflb.options import Paths
from ebpflb.tools import firewall, node_status
from ebpflb.tools.node_checks import (
    OK,
    WARNING,
    CheckResult,
    feature,
    judged,
    missing_requirements,
    processes,
    required_results,
)

_BRIDGES = "bridges of pods"
_BY_FLOWS = "packets are translated by ebpflb's own flow tables"


def check_node(paths: Paths, cgroup: Path | None) -> list[CheckResult]:
    """Return the results of all checks; if the capabilities or bpf(2) are missing, only of the
    checks that need neither.
    """
    results = required_results(paths.state, cgroup)
    if missing_requirements(results[:2]):
        return results
    netfilter = _netfilter(paths.answers_file)
    others = other_software(paths.state, cgroup)
    return [
        *results,
        *_optional(),
        netfilter,
        _bridged_pods(),
        *_stale_sockets(),
        *_processes(paths.state, cgroup),
        *others,
    ]


def _processes(state: Path, cgroup: Path | None) -> Iterator[CheckResult]:
    """Yield the processes outside the cgroup, if there is such a cgroup; None: the hooks' one."""
    with suppress(NodeError, ValueError):
        where = cgroup_links.cgroup_of(StateDir(state))
        if cgroup:
            root = cgroup_links.cgroup_root()
            where = Path("/") / cgroup_links.cgroup_root(cgroup).relative_to(root)
        yield processes(where)


def _optional() -> Iterator[CheckResult]:
    """Yield results about features that ebpflb can do without."""
    lost = "connections are refused over loopback; bind() to a NodePort succeeds"
    yield feature("errno from hooks", probe.set_retval(), "5.18", lost)
    lost = "each packet reads the exact clock, which is slower"
    yield feature("coarse clock", probe.coarse_clock(), "5.11", lost)
    lost = "the flow tables masquerade to the device's own address, whatever the route says"
    yield feature("source of a route", probe.route_source(), "6.7", lost)
    lost = "a program attached briefly at the start reads it"
    yield feature("SO_NETNS_COOKIE", namespaces.own_cookie() is not None, "5.14", lost)
    yield _one_packet_a_cpu()


REALTIME = Path("/sys/kernel/realtime")
CONFIGS = ("/proc/config.gz", "/boot/config-{}", "/lib/modules/{}/config")
_BH_LOCK = "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK"


def _one_packet_a_cpu() -> CheckResult:
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
    return judged("one packet a CPU", detail == "yes", detail, lost)


def _kernel_config() -> str | None:
    """Return the running kernel's configuration, or None if it cannot be read."""
    for name in CONFIGS:
        path = Path(name.format(os.uname().release))
        with suppress(OSError):
            found = path.read_bytes()
            return (gzip.decompress(found) if path.suffix == ".gz" else found).decode()
    return None


def _netfilter(answers: Path) -> CheckResult:
    """Return whether the kernel allows --packet-path=auto to use netfilter."""
    left = left_answers(answers)
    missing = left.netfilter if left else netfilter_obstacle()
    return judged("NAT by nftables", not missing, missing or "yes", _BY_FLOWS)


def _bridged_pods() -> CheckResult:
    """Return whether --packet-path=auto uses the flow tables because of bridges (bridged_pods)."""
    try:
        found = packet_path.unsuited(device_watch.list_devices().devices, (), bridge_calls())
    except EbpflbError as error:
        return CheckResult(_BRIDGES, WARNING, str(error))
    return judged(_BRIDGES, not found, found or "none bypasses netfilter", _BY_FLOWS)


def _stale_sockets() -> Iterator[CheckResult]:
    """Yield whether sockets of removed endpoints can be ended (kube-proxy.md 11.1, on-removal)."""
    lost = "connected UDP sockets keep a removed endpoint (modprobe udp_diag)"
    yield feature("destroying UDP sockets", sock_diag.can_destroy(), "4.9, INET_DIAG_DESTROY", lost)
    lost = "with on-removal: reset, TCP sockets keep a removed endpoint (modprobe tcp_diag)"
    ends_tcp = sock_diag.can_destroy(Protocol.TCP)
    yield feature("destroying TCP sockets", ends_tcp, "4.5, INET_DIAG_DESTROY", lost)
    can_enter = "CAP_SYS_ADMIN" in namespaces.capabilities()
    detail = "yes" if can_enter else "no (needs CAP_SYS_ADMIN)"
    lost = "connected UDP sockets of pods keep a removed backend"
    yield judged("listing pods' UDP sockets", can_enter, detail, lost)


# Other software's programs, rules and routes that act on the same traffic, for `ebpflb check`.

_RULES = "firewall rules"
_EACH_PACKET, _MOST = "rules for each packet", 3
_BY_HAND = f"compare them by hand with {DOCS}/firewalls.md"
_IF_NOT_WANTED = "if clients outside shall reach the Service, remove the rule"


def other_software(state_directory: Path, cgroup: Path | None) -> Iterator[CheckResult]:
    """Yield a result for each kind of neighbour."""
    yield _other_hooks(state_directory, cgroup)
    yield from _other_filters(state_directory)
    yield _kube_proxy(state_directory)
    yield from _ipvs()
    yield from _forwarding(state_directory)
    yield from _firewall(state_directory)


def _forwarding(state_directory: Path) -> Iterator[CheckResult]:
    """Yield whether pods get NodePort requests from clients outside, with and without kube-proxy's
    rules.
    """
    found = firewall.dropping(state_directory)
    for each in found:
        yield CheckResult("forwarded packets", WARNING, f"{each.tool}: {each.says}", each.remedy)
    if not found:
        yield CheckResult("forwarded packets", OK, "accepted for pods of this node")


def _firewall(state_directory: Path) -> Iterator[CheckResult]:
    """Yield the rules of netfilter that drop requests to Services (docs/firewalls.md)."""
    try:
        surveyed = firewall.survey(state_directory)
    except (EbpflbError, OSError) as error:
        yield CheckResult(_RULES, WARNING, f"cannot be read: {in_words(error)}", _BY_HAND)
        return
    for rule in surveyed.dropping or ():
        yield CheckResult("firewall rule", WARNING, rule, _IF_NOT_WANTED)
    for line in surveyed.unread:
        yield CheckResult(_RULES, WARNING, line, _BY_HAND)
    if surveyed.dropping is None:
        yield CheckResult(_RULES, OK, "are compared with Services once an agent has run")
    elif not (surveyed.dropping or surveyed.unread):
        yield CheckResult(_RULES, OK, "none drops requests to Services")
    yield _each_packet(surveyed.each_packet)


def _each_packet(rules: list[str]) -> CheckResult:
    """Return the rules for each packet and the routing by marks, which a flowtable bypasses.

    These are a fault only if there is a flowtable.
    """
    try:
        found, bypassed = rules + marked_routes(), nft.exists(flowtable.TABLE)
    except EbpflbError as error:
        return CheckResult(_EACH_PACKET, WARNING, str(error))
    more = f"; {len(found) - _MOST} more" if len(found) > _MOST else ""
    detail = "; ".join(found[:_MOST]) + more if found else "none"
    if not bypassed:
        detail += "; --fast-forward, which is off, would bypass them" if found else ""
        return CheckResult(_EACH_PACKET, OK, detail)
    remedy = "established flows bypass them: set --fast-forward=off or auto"
    return judged(_EACH_PACKET, not found, detail, remedy)


def _other_hooks(state_directory: Path, cgroup: Path | None) -> CheckResult:
    """Return the other programs at the socket hooks.

    If two load balancers are at the same hook, the second one sees only the first one's choice. The
    function of such a program is unknown.
    """

    def foreign() -> Mapping[str, list[str]]:
        ours = StateDir(state_directory).map_ids()
        return cgroup_links.foreign_programs(cgroup_links.cgroup_root(cgroup), ours)

    remedy = "check what they do: a filter may refuse connections; run only one load balancer"
    return _foreign("other programs at the hooks", foreign, remedy)


def _other_filters(state_directory: Path) -> Iterator[CheckResult]:
    """Yield the other programs at the devices, which run before ours or after them.

    Such a program may drop or redirect requests and replies.
    """

    @cache
    def others() -> device_programs.OthersPrograms:
        return device_programs.others_programs(StateDir(state_directory))

    remedy = "they run {} ebpflb and may drop or redirect packets: check what they do"
    for part, programs in (("before", lambda: others().before), ("after", lambda: others().after)):
        feature = f"programs {part} ebpflb's at devices"
        yield _foreign(feature, programs, remedy.format(part))


def _foreign(
    feature: str, list_programs: Callable[[], Mapping[str, list[str]]], remedy: str
) -> CheckResult:
    try:
        found = list_programs()
    except (EbpflbError, OSError) as error:
        return CheckResult(feature, WARNING, in_words(error))
    names = ", ".join(f"{where} ({', '.join(programs)})" for where, programs in found.items())
    return judged(feature, not found, names or "none", remedy)


def _kube_proxy(state_directory: Path) -> CheckResult:
    """Return whether kube-proxy runs, as it may during a migration."""
    try:
        found = node_status.detect(state_directory)
    except EbpflbError as error:
        return CheckResult("kube-proxy", WARNING, str(error))
    return judged("kube-proxy", not found.advice, found.state, found.advice)


def _ipvs() -> Iterator[CheckResult]:
    """Yield what kube-proxy's mode ipvs holds on this node, if it serves it, or did."""
    try:
        found = ipvs_state()
    except EbpflbError as error:
        yield CheckResult("IPVS", WARNING, str(error))
        return
    if found.summary:
        remedy = "its connections end when ebpflb starts: kube-proxy sets net.ipv4.vs.conntrack=1"
        yield judged("IPVS", "net/ipv4/vs/conntrack" in found.sysctls, found.summary, remedy)
