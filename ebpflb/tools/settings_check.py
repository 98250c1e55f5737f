# SPDX-License-Identifier: Apache-2.0
"""Settings of this network namespace that break services, and how full the maps are."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress

from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.sweep import FLOW_MAPS
from ebpflb.kernel.node import sysctls
from ebpflb.model.kernel_lists import format_numbers, parse_numbers
from ebpflb.plan.entries import Frontend
from ebpflb.tools.check_result import CheckResult
from ebpflb.tools.map_fill import MapFill, map_fill

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
    remedy = "" if is_ok else f"nearly full: {lost} (docs/limits.md)"
    return CheckResult(f"map {fill.name}", is_ok, False, detail, remedy)


def _read(name: str) -> str:
    """ "" where the kernel has no such setting."""
    with suppress(OSError):
        return sysctls.sysctl_path(name).read_text().strip()
    return ""


def _dotted(name: str) -> str:
    return name.replace("/", ".")
