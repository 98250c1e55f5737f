# SPDX-License-Identifier: Apache-2.0
"""The service ports whose connections are reset, as one agent leaves them to the next."""

from collections.abc import Iterable, Mapping
from ipaddress import ip_address

from msgspec import Struct

from ebpflb.model.services import PortName
from ebpflb.plan.entries import Frontend
from ebpflb.plan.removed_endpoints import Watched


class WatchedPort(Struct, frozen=True):
    """Without its endpoints: the next agent knows what the slices list then."""

    name: PortName
    grace: float
    frontends: tuple[tuple[str, int], ...]  # address and port


def saved(watched: Mapping[PortName, Watched]) -> tuple[WatchedPort, ...]:
    """Sorted, so that equal ones give the same file."""
    return tuple(
        WatchedPort(
            name, each.grace, tuple(sorted((str(f.address), f.port) for f in each.frontends))
        )
        for name, each in sorted(watched.items())
    )


def restored(ports: Iterable[WatchedPort]) -> dict[PortName, Watched]:
    """The inverse. Raises ValueError for an address that is none."""
    return {each.name: Watched(each.grace, _frontends(each)) for each in ports}


def _frontends(port: WatchedPort) -> frozenset[Frontend]:
    return frozenset(
        Frontend(ip_address(address), number, port.name.protocol)
        for address, number in port.frontends
    )
