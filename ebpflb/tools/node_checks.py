# SPDX-License-Identifier: Apache-2.0
"""What doctor checks of this node: sysctls, maps, whose sockets the hooks see, and routes."""

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ebpflb.files import DOCS
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.maps.sweep import FLOW_MAPS
from ebpflb.kernel.node import clients, process, routes, sysctls
from ebpflb.model.kernel_lists import format_numbers, parse_numbers
from ebpflb.plan.entries import Frontend
from ebpflb.tools.check_result import CheckResult
from ebpflb.tools.map_fill import MapFill, map_fill
from ebpflb.tools.snapshot import Snapshot

# Sysctls of this network namespace that break services, and how full the maps are.

NEARLY_FULL = 0.9  # of a map
_STRICT = "1"  # of rp_filter
_FORWARDING = {4: "net/ipv4/ip_forward", 6: "net/ipv6/conf/all/forwarding"}
_PORT_RANGE, _RESERVED = "net/ipv4/ip_local_port_range", "net/ipv4/ip_local_reserved_ports"


def settings_results(maps: Mapping[str, Map]) -> Iterator[CheckResult]:
    """Of each sysctl that matters to the frontends in the maps, and of each map's fill."""
    frontends = [frontend for frontend, _ in maps["services"].items()]
    yield from _forwarding({frontend.address.version for frontend in frontends})
    yield _local_ports(frontends)
    yield _reverse_path()
    yield from map(_fill, map_fill(maps))


def _forwarding(versions: set[int]) -> Iterator[CheckResult]:
    for version in sorted(versions):
        name = _FORWARDING[version]
        on = _read(name) != "0"
        lost = f"packets are not forwarded to pods and other nodes: sysctl {_dotted(name)}=1"
        yield CheckResult(
            f"forwarding of IPv{version}", on, True, _dotted(name), "" if on else lost
        )


def _local_ports(frontends: list[Frontend]) -> CheckResult:
    """A socket may get a NodePort as its own port; what it sends from there still works, but the
    replies of a connection from that port may be taken for a request to the NodePort.
    """
    first, _, last = _read(_PORT_RANGE).partition("\t")
    nodeports = {each.port for each in frontends if each.address.is_unspecified}
    local = range(int(first or 1), int(last or 0) + 1)
    common = {port for port in nodeports if port in local} - parse_numbers(_read(_RESERVED))
    detail = f"{first}-{last}, and {len(common)} of {len(nodeports)} NodePorts in it"
    remedy = f"sockets may get NodePorts: add {format_numbers(common)} to {_dotted(_RESERVED)}"
    return CheckResult("local ports", not common, False, detail, remedy if common else "")


def _reverse_path() -> CheckResult:
    """The kernel takes the greater one of "all" and the device's."""
    everywhere = _read("net/ipv4/conf/all/rp_filter")
    names = [name for _, name in socket.if_nameindex()]
    values = {name: max(everywhere, _read(f"net/ipv4/conf/{name}/rp_filter")) for name in names}
    strict = [name for name, value in values.items() if value == _STRICT and name != "lo"]
    remedy = (
        "packets that do not arrive by the device of the route to their source are "
        "dropped: use 0 or 2"
    )
    detail = f"strict on {', '.join(strict)}" if strict else "strict nowhere"
    return CheckResult("rp_filter", not strict, False, detail, remedy if strict else "")


def _fill(fill: MapFill) -> CheckResult:
    detail, lost = f"{fill.entries} of {fill.limit} entries", "what does not fit is not served"
    if fill.name == "choices":
        lost = "what does not fit has no scheduler and weights"
    elif fill.name in FLOW_MAPS:
        detail += " at the last sweep"
        lost = "the least recently used entries are evicted"
    is_ok = fill.share < NEARLY_FULL
    remedy = "" if is_ok else f"nearly full: {lost} ({DOCS}/limits.md)"
    return CheckResult(f"map {fill.name}", is_ok, False, detail, remedy)


def _read(name: str) -> str:
    """ "" where the kernel has no such setting."""
    with suppress(OSError):
        return sysctls.sysctl_path(name).read_text().strip()
    return ""


def _dotted(name: str) -> str:
    return name.replace("/", ".")


# Whose sockets the hooks see, and whether the node has a route to the endpoints that it uses.

_MOST_ASKED = 5000  # endpoints to which a route is asked for
_NAMED = 4  # in one line


def reach_results(state: StateDir, maps: Mapping[str, Map]) -> Iterator[CheckResult]:
    """In the network namespace of this thread. Raises KernelError, or OSError."""
    yield _processes(cgroup_links.cgroup_of(state))
    yield _routes(maps)


def _processes(cgroup: Path) -> CheckResult:
    """Those of containers too, where this process sees them. Threads of the kernel do not count:
    their sockets are no business of services.
    """
    if not process.sees_the_machine():
        detail = "unknown: a container sees only its own processes"
        remedy = "run doctor on the node itself, or in a container with the node's PID namespace"
        return CheckResult("processes", False, False, detail, remedy)
    there = {each: name for each in clients.processes() if (name := _name(each))}
    outside = [each for each in there if not clients.in_cgroup(each, cgroup)]
    if not outside:
        return CheckResult("processes", True, False, f"all {len(there)} in reach of the hooks", "")
    named = _some([f"{there[each]} ({each.name})" for each in outside])
    return CheckResult(
        "processes",
        False,
        False,
        f"{len(outside)} of {len(there)} are outside {cgroup}: {named}",
        "no hook sees their sockets: packets of pods are translated at their device, those of the"
        " node itself are not. Let --cgroup-root be the root of cgroup v2",
    )


def _name(folder: Path) -> str:
    """ "" for a thread of the kernel, and for a process that has ended."""
    with suppress(OSError):
        if os.readlink(f"{folder}/exe"):
            return (folder / "comm").read_text().strip()
    return ""


def _routes(maps: Mapping[str, Map]) -> CheckResult:
    slots = Snapshot(maps).slots.values()
    addresses = {backend.address for backend in slots if backend.service}
    asked = list(islice(addresses, _MOST_ASKED))
    lacking = [f"{address} ({why})" for address, why in routes.without_route(asked)]
    if not lacking:
        detail = f"routes exist to {_of(len(asked), len(addresses))} endpoints"
        return CheckResult("routes", True, False, detail, "")
    detail = f"no route to {len(lacking)} of {_of(len(asked), len(addresses))}: {_some(lacking)}"
    remedy = "connections to such an endpoint fail: check the CNI's routes (ip route)"
    return CheckResult("routes", False, False, detail, remedy)


def _of(asked: int, number: int) -> str:
    return f"{number}" if asked == number else f"{asked} (of {number})"


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
