# SPDX-License-Identifier: Apache-2.0
"""Whether this node can run ebpflb: each feature that it uses, and what is lost without it.

Every feature is tried; nothing is derived from the kernel's version. `ebpflb run` does not start,
and attaches nothing, if a required feature is missing.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ebpflb.datapath import conntrack_probe, kernel, probe
from ebpflb.datapath.attach import cgroup_links, device_programs, netns_cookie, tcx
from ebpflb.datapath.maps import state_dir
from ebpflb.datapath.programs import compiler
from ebpflb.datapath.programs.loader import SECTIONS
from ebpflb.errors import EbpflbError
from ebpflb.model import bridged_pods
from ebpflb.node import device_watch, kube_proxy_watch, nat, process, sock_diag
from ebpflb.node.bridge_calls import bridge_calls
from ebpflb.options import Paths


class CheckResult(NamedTuple):
    """Of one feature. ``remedy`` is "" if it is ok; else what to do, or what does not work."""

    feature: str
    ok: bool
    required: bool
    detail: str
    remedy: str


def check_node(state_directory: Path, cgroup: Path | None) -> list[CheckResult]:
    """Of all features; without the capabilities, only of those that can be checked without them."""
    results = required(state_directory, cgroup)
    if missing(results[:1]):
        return results
    return [*results, *_batches(), *_optional(), *_other_agents(state_directory, cgroup)]


def required(state_directory: Path, cgroup: Path | None) -> list[CheckResult]:
    """Of the features that ebpflb cannot run without, and of those that can replace one of them."""
    first = _capabilities()
    return [first, *_required(state_directory, cgroup)] if first.ok else [first, _bcc()]


def missing(results: list[CheckResult]) -> list[str]:
    """A line for each required feature that is missing."""
    return [f"{r.feature}: {r.detail}; {r.remedy}" for r in results if r.required and not r.ok]


def _required(state_directory: Path, cgroup: Path | None) -> Iterator[CheckResult]:
    yield _try("bpf(2)", _bpf, "run as root, outside a sandbox")
    yield _try("bpffs", lambda: _bpffs(state_directory), "mount -t bpf bpf /sys/fs/bpf")
    yield _try("cgroup v2", lambda: _cgroup(cgroup), "mount cgroup v2, or set --cgroup-root")
    yield _bcc()
    yield from _hooks()
    yield from _packet_hooks()
    yield _all_present("map types", probe.unmade_maps())


def _other_agents(state_directory: Path, cgroup: Path | None) -> Iterator[CheckResult]:
    """Programs and rules of others that handle the same traffic."""
    yield _other_hooks(state_directory, cgroup)
    yield _other_filters(state_directory)
    yield _kube_proxy()


def _capabilities() -> CheckResult:
    missing = process.missing_capabilities()
    detail = f"missing: {', '.join(missing)}" if missing else ", ".join(process.NEEDED_CAPABILITIES)
    remedy = "run as root, or grant them" if missing else ""
    return CheckResult("capabilities", not missing, True, detail, remedy)


def _bcc() -> CheckResult:
    version = compiler.bcc_version()
    remedy = "" if version else compiler.NO_BCC
    return CheckResult("BCC", version is not None, True, version or "missing", remedy)


def _try(feature: str, attempt: Callable[[], str], remedy: str) -> CheckResult:
    try:
        return CheckResult(feature, True, True, attempt(), "")
    except (EbpflbError, OSError) as error:
        return CheckResult(feature, False, True, str(error), remedy)


def _bpf() -> str:
    probe.map_works()
    return "works"


def _bpffs(state_directory: Path) -> str:
    state_dir.mount_bpffs(state_directory)
    return str(state_directory)


def _cgroup(cgroup: Path | None) -> str:
    root = cgroup or cgroup_links.cgroup_root()
    target = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        kernel.query(target, SECTIONS["cgroup/connect4"].attach_type)
    except EbpflbError as error:
        raise NotADirectoryError(f"{root} is not a cgroup v2: {error}") from error
    finally:
        os.close(target)
    return str(root)


def _hooks() -> Iterator[CheckResult]:
    for section in SECTIONS:
        yield _feature(f"hook {section}", probe.hook(section), "5.10", "required", required=True)


def _packet_hooks() -> Iterator[CheckResult]:
    """The helpers of packet programs, and the two ways to attach them: tcx, or else clsact."""
    helpers = probe.packet_helpers()
    yield _all_present("tc helpers", [name for name, ok in helpers.items() if not ok])
    has_tcx = tcx.works()
    yield _feature("tcx", has_tcx, "6.6", "clsact filters are used instead")
    yield _clsact(required=not has_tcx)


def _clsact(*, required: bool) -> CheckResult:
    lost = "required without tcx: modprobe -a sch_ingress cls_bpf"
    try:
        return _feature("clsact filters", probe.clsact_filters(), "4.5", lost, required=required)
    except (EbpflbError, OSError) as error:
        return CheckResult("clsact filters", False, False, f"cannot be checked: {error}", lost)


def _batches() -> Iterator[CheckResult]:
    """Batch operations, by map type."""
    since = {"LPM_TRIE": "5.13", "PERCPU_ARRAY": "5.13"}
    for kind, works in probe.batches().items():
        lost = "entries are written one by one: large updates take longer"
        yield _feature(f"batch operations: {kind}", works, since.get(kind, "5.6"), lost)


def _optional() -> Iterator[CheckResult]:
    """Features that ebpflb can do without."""
    lost = "connections are refused by way of loopback; bind() to a NodePort succeeds"
    yield _feature("errno from hooks", probe.set_retval(), "5.18", lost)
    lost = "each packet reads the exact clock, which takes longer"
    yield _feature("coarse clock", probe.coarse_clock(), "5.11", lost)
    lost = "a program that is attached briefly at the start reads it"
    yield _feature("SO_NETNS_COOKIE", netns_cookie.by_socket() is not None, "5.14", lost)
    yield _conntrack_engine()
    yield _bridged_pods()
    yield from _stale_sockets()


def _conntrack_engine() -> CheckResult:
    """Whether --packet-path=auto takes conntrack as far as the kernel is concerned."""
    missing = conntrack_probe.obstacle(Paths.cache) or nat.missing()
    lost = "flows of packets are kept in ebpflb's own tables" if missing else ""
    return CheckResult("conntrack engine", not missing, False, missing or "yes", lost)


def _bridged_pods() -> CheckResult:
    """Whether --packet-path=auto takes the flow tables because of bridges (bridged_pods)."""
    try:
        found = bridged_pods.unsuited(device_watch.list_devices().devices, (), bridge_calls())
    except EbpflbError as error:
        return CheckResult("bridges of pods", False, False, str(error), "")
    lost = "flows of packets are kept in ebpflb's own tables" if found else ""
    return CheckResult("bridges of pods", not found, False, found or "none past conntrack", lost)


def _stale_sockets() -> Iterator[CheckResult]:
    """What ending connected UDP sockets of removed backends needs (kube-proxy.md 11.1)."""
    can_list, can_destroy = sock_diag.can_list(), sock_diag.can_destroy()
    rebound = "pods' sockets are rebound to another backend; the node's own keep the removed one"
    lost = rebound if can_list else "they keep a removed backend: modprobe udp_diag"
    yield _feature("destroying UDP sockets", can_destroy, "4.9, INET_DIAG_DESTROY", lost)
    can_enter = "CAP_SYS_ADMIN" in process.capabilities()
    detail = "yes" if can_enter else "no (needs CAP_SYS_ADMIN)"
    remedy = "" if can_enter else "connected UDP sockets of pods keep a removed backend"
    yield CheckResult("listing pods' UDP sockets", can_enter, False, detail, remedy)


def _feature(
    feature: str, ok: bool, since: str, lost: str, *, required: bool = False
) -> CheckResult:
    detail = "yes" if ok else f"no (since kernel {since})"
    return CheckResult(feature, ok, required, detail, "" if ok else lost)


def _all_present(feature: str, missing: list[str]) -> CheckResult:
    detail = f"missing: {', '.join(missing)}" if missing else "yes"
    return CheckResult(feature, not missing, True, detail, "required" if missing else "")


def _other_hooks(state_directory: Path, cgroup: Path | None) -> CheckResult:
    """Two load balancers at the same hook: the second one only sees the first one's backend."""

    def foreign() -> Mapping[str, list[str]]:
        ours = cgroup_links.attached(state_dir.StateDir(state_directory)).values()
        return cgroup_links.foreign_programs(cgroup or cgroup_links.cgroup_root(), ours)

    return _foreign(
        "other agents' hooks", foreign, "another agent translates services here too: run only one"
    )


def _other_filters(state_directory: Path) -> CheckResult:
    """Programs that run before ebpflb's at a device may drop or redirect its packets."""
    remedy = "they run before ebpflb and may drop or redirect packets: find out what they do"
    return _foreign(
        "programs before ebpflb's at devices",
        lambda: device_programs.programs_before_ours(state_dir.StateDir(state_directory)),
        remedy,
    )


def _foreign(
    feature: str, list_programs: Callable[[], Mapping[str, list[str]]], remedy: str
) -> CheckResult:
    try:
        found = list_programs()
    except (EbpflbError, OSError) as error:
        return CheckResult(feature, False, False, str(error), "")
    names = ", ".join(f"{where} ({', '.join(programs)})" for where, programs in found.items())
    return CheckResult(feature, not found, False, names or "none", remedy if found else "")


def _kube_proxy() -> CheckResult:
    """It may run at the same time during a migration."""
    try:
        found = kube_proxy_watch.detect()
    except EbpflbError as error:
        return CheckResult("kube-proxy", False, False, str(error), "")
    return CheckResult("kube-proxy", not found.advice, False, found.state, found.advice)
