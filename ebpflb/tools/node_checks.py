# SPDX-License-Identifier: Apache-2.0
"""Checks of the node for `check` and `doctor`: requirements, sysctls, maps, sockets, routes."""

import errno
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ebpflb.entries.services import Frontend
from ebpflb.errors import EbpflbError, KernelError, in_words
from ebpflb.files import DOCS
from ebpflb.kernel import bpf, probe
from ebpflb.kernel.attach import cgroup_links, tcx
from ebpflb.kernel.maps import state_dir
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.sweep import FLOW_MAPS
from ebpflb.kernel.node import namespaces, routes, sysctls
from ebpflb.kernel.programs import compiler, precompile
from ebpflb.kernel.programs.loader import HOOK_TYPES, ITER_TCP, SECTIONS
from ebpflb.model.addresses import format_numbers, parse_numbers
from ebpflb.tools.snapshot import MapFill, Snapshot, map_fill

# The result of `ebpflb check` for one feature of the node.


OK, WARNING, WRONG = "ok", "warning", "wrong"  # wrong: ebpflb needs it


class CheckResult(NamedTuple):
    """The result for one feature. ``remedy``: what to do, or what does not work."""

    feature: str
    result: str  # OK, WARNING or WRONG
    detail: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        return self.result == OK


def judged(
    feature: str, ok: bool, detail: str, remedy: str = "", *, required: bool = False
) -> CheckResult:
    """Return a result: ok, or wrong with this remedy."""
    if ok:
        return CheckResult(feature, OK, detail)
    return CheckResult(feature, WRONG if required else WARNING, detail, remedy)


def feature(
    feature: str, ok: bool, since: str, lost: str, *, required: bool = False
) -> CheckResult:
    """Return the result for a kernel feature; ``lost`` says what does not work without it."""
    detail = "yes" if ok else f"no (since kernel {since})"
    return judged(feature, ok, detail, lost, required=required)


# Sysctls of this network namespace that break services, and how full the maps are.

NEARLY_FULL = 0.9  # of a map
_STRICT = "1"  # of rp_filter
_FORWARDING = {4: "net/ipv4/ip_forward", 6: "net/ipv6/conf/all/forwarding"}
_PORT_RANGE, _RESERVED = "net/ipv4/ip_local_port_range", "net/ipv4/ip_local_reserved_ports"


def settings_results(maps: Mapping[str, Map]) -> Iterator[CheckResult]:
    """Yield a result for each sysctl that matters to the frontends in the maps, and for each map's
    fill.
    """
    frontends = [frontend for frontend, _ in maps["services"].items()]
    yield from _forwarding({frontend.address.version for frontend in frontends})
    yield _local_ports(frontends)
    yield _reverse_path()
    yield from map(_fill, map_fill(maps))


def _forwarding(versions: set[int]) -> Iterator[CheckResult]:
    for version in sorted(versions):
        name = _FORWARDING[version]
        on = sysctls.read_sysctl(name) != "0"
        lost = f"packets are not forwarded to pods and other nodes: sysctl {_dotted(name)}=1"
        yield judged(f"forwarding of IPv{version}", on, _dotted(name), lost, required=True)


def _local_ports(frontends: list[Frontend]) -> CheckResult:
    """Return whether sockets may get NodePorts as their own ports.

    Such a socket can send, but the replies may be taken for requests to the NodePort.
    """
    first, _, last = sysctls.read_sysctl(_PORT_RANGE).partition("\t")
    nodeports = {each.port for each in frontends if each.address.is_unspecified}
    local = range(int(first or 1), int(last or 0) + 1)
    common = {port for port in nodeports if port in local} - parse_numbers(
        sysctls.read_sysctl(_RESERVED)
    )
    detail = f"{first}-{last}, and {len(common)} of {len(nodeports)} NodePorts in it"
    remedy = f"sockets may get NodePorts: add {format_numbers(common)} to {_dotted(_RESERVED)}"
    return judged("local ports", not common, detail, remedy)


def _reverse_path() -> CheckResult:
    """Return the devices with a strict rp_filter. The kernel uses the greater value of "all" and
    the device.
    """
    everywhere = sysctls.read_sysctl("net/ipv4/conf/all/rp_filter")
    names = [name for _, name in socket.if_nameindex()]
    values = {
        name: max(everywhere, sysctls.read_sysctl(f"net/ipv4/conf/{name}/rp_filter"))
        for name in names
    }
    strict = [name for name, value in values.items() if value == _STRICT and name != "lo"]
    remedy = (
        "packets that do not arrive by the device of the route to their source are "
        "dropped: use 0 or 2"
    )
    detail = f"strict on {', '.join(strict)}" if strict else "strict nowhere"
    return judged("rp_filter", not strict, detail, remedy)


def _fill(fill: MapFill) -> CheckResult:
    detail, lost = f"{fill.entries} of {fill.limit} entries", "what does not fit is not served"
    if fill.name == "choices":
        lost = "what does not fit has no scheduler and weights"
    elif fill.name in FLOW_MAPS:
        detail += " at the last sweep"
        lost = "the least recently used entries are evicted"
    remedy = f"nearly full: {lost} ({DOCS}/limits.md)"
    return judged(f"map {fill.name}", fill.share < NEARLY_FULL, detail, remedy)


def _dotted(name: str) -> str:
    return name.replace("/", ".")


# Whether the hooks see all sockets, and the node has a route to its endpoints.

_MOST_ASKED = 5000  # endpoints whose routes are asked for
_NAMED = 4  # in one line


_HOST_NETWORK = Path("/proc/1/ns/net")


def processes(cgroup: Path) -> CheckResult:
    """Return the processes outside the served cgroup, in containers too if this process sees them.

    Kernel threads are left out: their sockets do not use Services.
    """
    if not namespaces.sees_the_machine():
        detail = "unknown: a container sees only its own processes"
        remedy = "run this on the node itself, or in a container with the node's PID namespace"
        return CheckResult("processes", WARNING, detail, remedy)
    there = {each: name for each in namespaces.processes() if (name := _name(each))}
    outside = [each for each in there if not namespaces.in_cgroup(each, cgroup)]
    if not outside:
        return CheckResult("processes", OK, f"all {len(there)} in reach of the hooks")
    node = namespaces.identity(_HOST_NETWORK)
    own = sum(namespaces.identity(each / "ns/net") == node for each in outside)
    named = _some([f"{there[each]} ({each.name})" for each in outside])
    return CheckResult(
        "processes",
        WARNING,
        f"{len(outside)} of {len(there)} are outside {cgroup}, {own} of them in the node's network"
        f" namespace: {named}",
        "no hook sees their sockets: packets of pods are translated at their device, those of the"
        " node itself are not, and with netfilter not refused: they leave by the node's routes. Let"
        " --cgroup-root be the root of cgroup v2",
    )


def _name(folder: Path) -> str:
    """Return the name of a process; "" for a kernel thread, or a process that has ended."""
    with suppress(OSError):
        if os.readlink(f"{folder}/exe"):
            return (folder / "comm").read_text().strip()
    return ""


def routes_result(maps: Mapping[str, Map]) -> CheckResult:
    """Return whether this network namespace has routes to the endpoints. Raises OSError."""
    slots = Snapshot(maps).slots.values()
    addresses = {backend.address for backend in slots if backend.service}
    asked = list(islice(addresses, _MOST_ASKED))
    lacking = [f"{address} ({why})" for address, why in routes.without_route(asked)]
    if not lacking:
        detail = f"routes exist to {_of(len(asked), len(addresses))} endpoints"
        return CheckResult("routes", OK, detail)
    detail = f"no route to {len(lacking)} of {_of(len(asked), len(addresses))}: {_some(lacking)}"
    remedy = "connections to such an endpoint fail: check the CNI's routes (ip route)"
    return CheckResult("routes", WARNING, detail, remedy)


def _of(asked: int, number: int) -> str:
    return f"{number}" if asked == number else f"{asked} (of {number})"


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


# The requirements of ebpflb. Every feature is tried; no version is asked.
#
# `ebpflb run` does not start, and attaches nothing, if a required feature is missing.


def required_results(state_directory: Path, cgroup: Path | None) -> list[CheckResult]:
    """Return the results for the features that ebpflb cannot run without, and for their
    substitutes.
    """
    found = [_capabilities()]
    if found[0].ok:
        found.append(_bpf())
    if missing_requirements(found):
        return [*found, bcc_requirement()]
    return [*found, *_required(state_directory, cgroup)]


def missing_requirements(results: list[CheckResult]) -> list[str]:
    """Return a line for each required feature that is missing."""
    return [f"{r.feature}: {r.detail}; {r.remedy}" for r in results if r.result == WRONG]


_NO_DESCRIPTOR = 2**32 - 1


def _required(state_directory: Path, cgroup: Path | None) -> Iterator[CheckResult]:
    yield _clock()
    yield _try("bpffs", lambda: _bpffs(state_directory), "mount -t bpf bpf /sys/fs/bpf")
    yield _try("cgroup v2", lambda: _cgroup(cgroup), "mount cgroup v2, or set --cgroup-root")
    yield bcc_requirement()
    yield _hooks()
    yield from _attachments()


def _capabilities() -> CheckResult:
    missing, needed = namespaces.missing_capabilities(), ", ".join(namespaces.NEEDED_CAPABILITIES)
    detail = f"missing: {', '.join(missing)}" if missing else needed
    return judged("capabilities", not missing, detail, "run as root, or grant them", required=True)


def _clock() -> CheckResult:
    """Return whether this process has the machine's monotonic clock, by which programs count.

    In a time namespace the agent would remove flows in use as idle, or never remove any.
    """
    if not (shift := namespaces.clock_shift()):
        return CheckResult("monotonic clock", OK, "the machine's")
    detail = f"{shift:+g} s from the machine's, by a time namespace"
    return CheckResult("monotonic clock", WRONG, detail, "run it outside that namespace")


def bcc_requirement() -> CheckResult:
    version = compiler.bcc_version()
    if version is None and precompile.is_brought():
        return CheckResult("BCC", OK, "missing; the installed bytecode is used")
    is_there = version is not None
    return judged("BCC", is_there, version or "missing", compiler.NO_BCC, required=True)


def _try(feature: str, attempt: Callable[[], str], remedy: str) -> CheckResult:
    try:
        return CheckResult(feature, OK, attempt())
    except (EbpflbError, OSError) as error:
        return CheckResult(feature, WRONG, in_words(error), remedy)


def _bpf() -> CheckResult:
    """Return whether a map can be made. If the capabilities are there, only a filter can refuse all
    bpf(2) calls.
    """
    if _refuses_all() and namespaces.has_seccomp_filter():
        detail = "refused by the seccomp profile of this container"
        remedy = f"update the container runtime, or choose another profile: {DOCS}/install.md"
        return CheckResult("bpf(2)", WRONG, detail, remedy)
    return _try("bpf(2)", _make_map, "run as root, outside a sandbox")


def _make_map() -> str:
    probe.map_works()
    return "works"


def _refuses_all() -> bool:
    try:
        bpf.query(_NO_DESCRIPTOR, SECTIONS["cgroup/connect4"].attach_type)
    except KernelError as error:
        return error.errno == errno.EPERM  # the kernel itself finds no such descriptor
    return False


def _bpffs(state_directory: Path) -> str:
    state_dir.mount_bpffs(state_directory)
    return str(state_directory)


def _cgroup(cgroup: Path | None) -> str:
    root = cgroup_links.cgroup_root(cgroup)
    try:
        with cgroup_links.opened(root) as target:
            bpf.query(target, SECTIONS["cgroup/connect4"].attach_type)
    except EbpflbError as error:
        raise NotADirectoryError(f"{root} is not a cgroup v2") from error
    return str(root)


def _hooks() -> CheckResult:
    """Return whether the kernel has all hooks; if so, it also has our maps and helpers."""
    needed = [section for section in HOOK_TYPES if section != ITER_TCP]
    missing = [section for section in needed if not probe.hook(section)]
    detail = f"missing: {', '.join(missing)}" if missing else "yes"
    return judged("kernel hooks", not missing, detail, "Linux 5.10 has them", required=True)


# The kernel stops a device while it adds a qdisc (qdisc_graft, dev_deactivate).
_BY_CLSACT = (
    "clsact filters are used instead; a device drops outgoing packets for the millisecond in "
    "which it first gets a filter, a new pod's device gets its filters after 2 s, and one with a "
    "qdisc ingress (the CNI plugin bandwidth) is served by the engine netfilter only"
)


def _attachments() -> Iterator[CheckResult]:
    """Yield whether one of the two ways to attach to devices works."""
    has_tcx = tcx.works()
    yield feature("tcx", has_tcx, "6.6", _BY_CLSACT)
    yield _clsact(required=not has_tcx)


def _clsact(*, required: bool) -> CheckResult:
    lost = "required without tcx: modprobe -a sch_ingress cls_bpf"
    try:
        return feature("clsact filters", probe.clsact_filters(), "4.5", lost, required=required)
    except (EbpflbError, OSError) as error:
        return CheckResult("clsact filters", WARNING, f"cannot be checked: {in_words(error)}", lost)
