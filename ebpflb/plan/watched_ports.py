# SPDX-License-Identifier: Apache-2.0
"""The service ports whose connections are reset, and how one agent leaves them to the next."""

from collections import UserDict
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from ebpflb.model.addresses import Address
from ebpflb.model.on_removal import LONGEST_GRACE
from ebpflb.model.services import PortName
from ebpflb.plan.entries import Frontend

Endpoint = tuple[Address, int]


class Watched(NamedTuple):
    """A service port whose connections are reset ``grace`` seconds after their endpoint has gone.

    ``endpoints``: those that its slices list now.
    """

    grace: float
    frontends: frozenset[Frontend]
    endpoints: frozenset[Endpoint] = frozenset()


class WatchedPort(Struct, frozen=True):
    """Without its endpoints: the next agent knows what the slices list then."""

    name: PortName
    grace: Annotated[float, Meta(ge=0, le=LONGEST_GRACE)]
    frontends: tuple[tuple[str, Annotated[int, Meta(ge=0, lt=1 << 16)]], ...]  # address and port

    def __post_init__(self) -> None:
        """Raises ValueError for an address that is none, as the status of an agent may have it."""
        for address, _ in self.frontends:
            ip_address(address)


class WatchedPorts(UserDict[PortName, Watched]):
    """By name. A change costs the same whatever else is watched, one of endpoints alone nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._ports: dict[PortName, WatchedPort] = {}
        self._saved: tuple[WatchedPort, ...] | None = ()

    def __setitem__(self, name: PortName, watched: Watched) -> None:
        former = self.data.get(name)
        super().__setitem__(name, watched)
        if former is None or former[:2] != watched[:2]:
            self._ports[name] = _port(name, watched)
            self._saved = None

    def __delitem__(self, name: PortName) -> None:
        super().__delitem__(name)
        del self._ports[name]
        self._saved = None

    @property
    def saved(self) -> tuple[WatchedPort, ...]:
        """For ``restored``; the same object as long as nothing of it changes."""
        if self._saved is None:
            self._saved = tuple(self._ports.values())
        return self._saved


def restored(ports: Iterable[WatchedPort]) -> dict[PortName, Watched]:
    """The inverse of ``saved``."""
    return {each.name: Watched(each.grace, _frontends(each)) for each in ports}


def _port(name: PortName, watched: Watched) -> WatchedPort:
    frontends = sorted((str(each.address), each.port) for each in watched.frontends)
    return WatchedPort(name, watched.grace, tuple(frontends))


def _frontends(port: WatchedPort) -> frozenset[Frontend]:
    return frozenset(
        Frontend(ip_address(address), number, port.name.protocol)
        for address, number in port.frontends
    )
