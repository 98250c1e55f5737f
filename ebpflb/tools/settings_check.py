# SPDX-License-Identifier: Apache-2.0
"""Settings of this network namespace that break services, and how full the maps are."""

import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from ebpflb.kernel.map_writer import capacity_of
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.sweep import FLOW_MAPS, FlowTable
from ebpflb.kernel.node import sysctls
from ebpflb.model.kernel_lists import format_numbers, parse_numbers
from ebpflb.plan.entries import Frontend, Range, ServiceEntry
from ebpflb.tools.check_result import CheckResult

NEARLY_FULL = 0.9  # of a map
_STRICT = "1"  # of rp_filter
_FORWARDING = {4: "net/ipv4/ip_forward", 6: "net/ipv6/conf/all/forwarding"}
_PORT_RANGE, _RESERVED = "net/ipv4/ip_local_port_range", "net/ipv4/ip_local_reserved_ports"


def settings_results(maps: Mapping[str, Map]) -> Iterator[CheckResult]:
    """Of each sysctl that matters to the frontends in the maps, and of each map's fill."""
    services = dict(maps["services"].items())
    frontends = list(services)
    yield from _forwarding({frontend.address.version for frontend in frontends})
    yield _local_ports(frontends)
    yield _reverse_path()
    yield from _fill(maps, services)
    yield from _flows(maps)


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


def _fill(
    maps: Mapping[str, Map], services: Mapping[Frontend, ServiceEntry]
) -> Iterator[CheckResult]:
    most = capacity_of(maps)
    counts = {
        "services": (len(services), most.services),
        "slots": (_size(it.block for it in services.values()), most.slots),
        "choices": (_size(it.tables for it in services.values()), most.choices),
        "service_names": (_count(maps["service_names"]), most.service_ids),
        "backend_names": (_count(maps["backend_names"]), most.backend_ids),
        "source_ranges": (_count(maps["source_ranges"]), most.source_ranges),
    }
    for name, (used, entries) in counts.items():
        is_ok = used < NEARLY_FULL * entries
        lost = "has no scheduler and weights" if name == "choices" else "is not served"
        remedy = "" if is_ok else f"nearly full: what does not fit {lost} (docs/limits.md)"
        yield CheckResult(f"map {name}", is_ok, False, f"{used} of {entries} entries", remedy)


def _flows(maps: Mapping[str, Map]) -> Iterator[CheckResult]:
    """Of the tables of flows, as of the agent's last sweep."""
    for table in (FlowTable(maps, name) for name in FLOW_MAPS):
        used, entries = table.numbers.entries, table.flows.spec.entries
        is_ok = used < NEARLY_FULL * entries
        remedy = (
            ""
            if is_ok
            else "nearly full: the least recently used entries are evicted (docs/limits.md)"
        )
        detail = f"{used} of {entries} entries at the last sweep"
        yield CheckResult(f"map {table.name}", is_ok, False, detail, remedy)


def _size(ranges: Iterable[Range]) -> int:
    """Of all of them together; frontends of a service share theirs."""
    return sum(each.size for each in set(ranges))


def _count(opened: Map) -> int:
    return sum(len(keys) // opened.spec.key_size for keys, _ in opened.slices())


def _read(name: str) -> str:
    """ "" where the kernel has no such setting."""
    with suppress(OSError):
        return sysctls.sysctl_path(name).read_text().strip()
    return ""


def _dotted(name: str) -> str:
    return name.replace("/", ".")
