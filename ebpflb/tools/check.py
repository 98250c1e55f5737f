# SPDX-License-Identifier: Apache-2.0
"""Whether this node can run ebpflb: each feature that it uses, and what is lost without it.

Every feature is tried; nothing is derived from the kernel's version. Only whether packets of one
CPU can get in each other's way is read from the kernel's configuration.
"""

import gzip
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ebpflb.errors import EbpflbError, NodeError, in_words
from ebpflb.kernel import bpf, probe
from ebpflb.kernel.attach import cgroup_links, netns_cookie, tcx
from ebpflb.kernel.maps import state_dir
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.netfilter.flowtable import flowtable_obstacle
from ebpflb.kernel.netfilter.probe import netfilter_obstacle
from ebpflb.kernel.node import device_watch, process, sock_diag
from ebpflb.kernel.node.sysctls import bridge_calls
from ebpflb.kernel.programs import compiler, precompile
from ebpflb.kernel.programs.loader import SECTIONS
from ebpflb.model import packet_path
from ebpflb.model.packet_path import Engine
from ebpflb.plan.entries import Flags
from ebpflb.tools import neighbours
from ebpflb.tools.check_result import CheckResult, feature

# What a node must have to run ebpflb: each feature is tried, nothing is derived from the version.
#
# `ebpflb run` does not start, and attaches nothing, if a required feature is missing.


def required_results(state_directory: Path, cgroup: Path | None) -> list[CheckResult]:
    """Of the features that ebpflb cannot run without, and of those that can replace one of them."""
    first = _capabilities()
    return [first, *_required(state_directory, cgroup)] if first.ok else [first, _bcc()]


def missing_requirements(results: list[CheckResult]) -> list[str]:
    """A line for each required feature that is missing."""
    return [f"{r.feature}: {r.detail}; {r.remedy}" for r in results if r.required and not r.ok]


def _required(state_directory: Path, cgroup: Path | None) -> Iterator[CheckResult]:
    yield _clock()
    yield _try("bpf(2)", _bpf, "run as root, outside a sandbox")
    yield _try("bpffs", lambda: _bpffs(state_directory), "mount -t bpf bpf /sys/fs/bpf")
    yield _try("cgroup v2", lambda: _cgroup(cgroup), "mount cgroup v2, or set --cgroup-root")
    yield _bcc()
    yield from _hooks()
    yield from _packet_hooks()
    yield _all_present("map types", probe.unmade_maps())


def _capabilities() -> CheckResult:
    missing_requirements = process.missing_capabilities()
    detail = (
        f"missing: {', '.join(missing_requirements)}"
        if missing_requirements
        else ", ".join(process.NEEDED_CAPABILITIES)
    )
    remedy = "run as root, or grant them" if missing_requirements else ""
    return CheckResult("capabilities", not missing_requirements, True, detail, remedy)


def _clock() -> CheckResult:
    """Programs count by the machine's: flows in use would be swept as idle, or none ever."""
    if not (shift := process.clock_shift()):
        return CheckResult("monotonic clock", True, True, "the machine's", "")
    detail = f"{shift:+g} s from the machine's, by a time namespace"
    return CheckResult("monotonic clock", False, True, detail, "run it outside that namespace")


def _bcc() -> CheckResult:
    version = compiler.bcc_version()
    if version is None and precompile.is_brought():
        return CheckResult("BCC", True, False, "missing; the installed bytecode is used", "")
    remedy = "" if version else compiler.NO_BCC
    return CheckResult("BCC", version is not None, True, version or "missing", remedy)


def _try(feature: str, attempt: Callable[[], str], remedy: str) -> CheckResult:
    try:
        return CheckResult(feature, True, True, attempt(), "")
    except (EbpflbError, OSError) as error:
        return CheckResult(feature, False, True, in_words(error), remedy)


def _bpf() -> str:
    probe.map_works()
    return "works"


def _bpffs(state_directory: Path) -> str:
    state_dir.mount_bpffs(state_directory)
    return str(state_directory)


def _cgroup(cgroup: Path | None) -> str:
    root = cgroup_links.cgroup_root(cgroup)
    target = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        bpf.query(target, SECTIONS["cgroup/connect4"].attach_type)
    except EbpflbError as error:
        raise NotADirectoryError(f"{root} is not a cgroup v2") from error
    finally:
        os.close(target)
    return str(root)


def _hooks() -> Iterator[CheckResult]:
    for section in SECTIONS:
        yield feature(f"hook {section}", probe.hook(section), "5.10", "required", required=True)


# The kernel stops a device while it adds a qdisc (qdisc_graft, dev_deactivate).
_BY_CLSACT = (
    "clsact filters are used instead; a device drops outgoing packets for the millisecond in "
    "which it first gets a filter"
)


def _packet_hooks() -> Iterator[CheckResult]:
    """The helpers of packet programs, and the two ways to attach them: tcx, or else clsact."""
    helpers = probe.packet_helpers()
    yield _all_present("tc helpers", [name for name, ok in helpers.items() if not ok])
    has_tcx = tcx.works()
    yield feature("tcx", has_tcx, "6.6", _BY_CLSACT)
    yield _clsact(required=not has_tcx)


def _clsact(*, required: bool) -> CheckResult:
    lost = "required without tcx: modprobe -a sch_ingress cls_bpf"
    try:
        return feature("clsact filters", probe.clsact_filters(), "4.5", lost, required=required)
    except (EbpflbError, OSError) as error:
        return CheckResult(
            "clsact filters", False, False, f"cannot be checked: {in_words(error)}", lost
        )


def _all_present(feature: str, missing: list[str]) -> CheckResult:
    detail = f"missing: {', '.join(missing)}" if missing else "yes"
    return CheckResult(feature, not missing, True, detail, "required" if missing else "")


_NETFILTER, _BRIDGES = "NAT by nftables", "bridges of pods"


def check_node(state_directory: Path, cgroup: Path | None) -> list[CheckResult]:
    """Of all features; without the capabilities, only of those that can be checked without them."""
    results = required_results(state_directory, cgroup)
    if missing_requirements(results[:1]):
        return results
    flags = _flags(state_directory)
    optional = list(_optional(fast_forward="fast_forward" in flags))
    others = neighbours.results(state_directory, cgroup, _engine(optional), flags)
    return [*results, *_batches(), *optional, *others]


def _flags(state_directory: Path) -> Flags:
    """The settings in force; none where no agent has written any."""
    try:
        maps = StateDir(state_directory).read_maps()
    except NodeError:
        return frozenset()
    try:
        flags: Flags = maps["settings"].get(0).flags
        return flags
    finally:
        for opened in maps.values():
            opened.close()


def _batches() -> Iterator[CheckResult]:
    """Batch operations, by map type."""
    since = {"LPM_TRIE": "5.13", "PERCPU_ARRAY": "5.13"}
    for kind, works in probe.batches().items():
        lost = "entries are written one by one, so large updates take longer"
        yield feature(f"batch operations: {kind}", works, since.get(kind, "5.6"), lost)


def _optional(*, fast_forward: bool) -> Iterator[CheckResult]:
    """Features that ebpflb can do without."""
    lost = "connections are refused over loopback; bind() to a NodePort succeeds"
    yield feature("errno from hooks", probe.set_retval(), "5.18", lost)
    lost = "each packet reads the exact clock, which is slower"
    yield feature("coarse clock", probe.coarse_clock(), "5.11", lost)
    lost = "the agent reads all routes to list the sources of masqueraded flows"
    yield feature("source of a route", probe.route_source(), "6.7", lost)
    lost = "a program attached briefly at the start reads it"
    yield feature("SO_NETNS_COOKIE", netns_cookie.by_socket() is not None, "5.14", lost)
    yield _one_packet_a_cpu()
    yield _netfilter()
    if fast_forward:
        yield _flowtable()
    yield _bridged_pods()
    yield from _stale_sockets()


_REALTIME = Path("/sys/kernel/realtime")
_CONFIGS = ("/proc/config.gz", "/boot/config-{}", "/lib/modules/{}/config")
_BH_LOCK = "CONFIG_PREEMPT_RT_NEEDS_BH_LOCK"


def _one_packet_a_cpu() -> CheckResult:
    """Whether the kernel handles one packet at a time on a CPU: a program keeps what it knows of a
    packet in map `scratch`, which has one element for each CPU.

    The kernel runs these programs with softirqs disabled, so that none starts before another one of
    the CPU has ended. With PREEMPT_RT that takes a lock, which such kernels can leave out since
    6.18.
    """
    name, apart = "one packet a CPU", "yes"
    if not _is_one(_REALTIME):
        return CheckResult(name, True, False, apart, "")
    config = _kernel_config()
    if config is None:
        detail = f"unknown: a PREEMPT_RT kernel whose configuration is not readable ({_BH_LOCK})"
    elif f"# {_BH_LOCK} is not set" not in config.splitlines():
        return CheckResult(name, True, False, apart, "")
    else:
        detail = f"no: PREEMPT_RT without {_BH_LOCK}"
    lost = "packets may be translated with the data of another one: use a kernel that has this lock"
    return CheckResult(name, False, False, detail, lost)


def _is_one(path: Path) -> bool:
    with suppress(OSError):
        return path.read_text().strip() == "1"
    return False


def _kernel_config() -> str | None:
    """The running kernel's configuration; None where it cannot be read."""
    for name in _CONFIGS:
        path = Path(name.format(os.uname().release))
        with suppress(OSError):
            found = path.read_bytes()
            return (gzip.decompress(found) if path.suffix == ".gz" else found).decode()
    return None


def _engine(optional: Iterable[CheckResult]) -> Engine:
    """What --packet-path=auto takes."""
    needed = [r.ok for r in optional if r.feature in (_NETFILTER, _BRIDGES)]
    return Engine.NETFILTER if all(needed) else Engine.FLOWS


def _netfilter() -> CheckResult:
    """Whether --packet-path=auto takes netfilter as far as the kernel is concerned."""
    missing = netfilter_obstacle()
    lost = "packets are translated by ebpflb's own flow tables" if missing else ""
    return CheckResult(_NETFILTER, not missing, False, missing or "yes", lost)


def _flowtable() -> CheckResult:
    """What --fast-forward needs with netfilter."""
    missing = flowtable_obstacle()
    lost = "--fast-forward has no effect with netfilter" if missing else ""
    return CheckResult("nf_flow_table", not missing, False, missing or "yes", lost)


def _bridged_pods() -> CheckResult:
    """Whether --packet-path=auto takes the flow tables because of bridges (bridged_pods)."""
    try:
        found = packet_path.unsuited(device_watch.list_devices().devices, (), bridge_calls())
    except EbpflbError as error:
        return CheckResult(_BRIDGES, False, False, str(error), "")
    lost = "packets are translated by ebpflb's own flow tables" if found else ""
    return CheckResult(_BRIDGES, not found, False, found or "none bypasses netfilter", lost)


def _stale_sockets() -> Iterator[CheckResult]:
    """What ending sockets of removed backends needs (kube-proxy.md 11.1, on_removal)."""
    can_list, can_destroy = sock_diag.can_list(), sock_diag.can_destroy()
    rebound = "pods' sockets are moved to another backend; the node's own keep the removed one"
    lost = rebound if can_list else "UDP sockets keep a removed backend: modprobe udp_diag"
    yield feature("destroying UDP sockets", can_destroy, "4.9, INET_DIAG_DESTROY", lost)
    lost = "with on-removal: reset, sockets keep a removed endpoint (modprobe tcp_diag)"
    yield feature(
        "destroying TCP sockets", sock_diag.can_destroy_tcp(), "4.5, INET_DIAG_DESTROY", lost
    )
    can_enter = "CAP_SYS_ADMIN" in process.capabilities()
    detail = "yes" if can_enter else "no (needs CAP_SYS_ADMIN)"
    remedy = "" if can_enter else "connected UDP sockets of pods keep a removed backend"
    yield CheckResult("listing pods' UDP sockets", can_enter, False, detail, remedy)
