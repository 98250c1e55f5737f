# SPDX-License-Identifier: Apache-2.0
"""`ebpflb doctor` beside the agent: when its canary is there, and whom that serves.

The canary has the port of one of FRONTENDS, and a cluster IP and NodePort of theirs while no
Service has them. So whatever asks those asks the canary: its client, the node, and those whom it
must not serve. A Service that comes to claim one of its frontends gets it.
"""

from collections.abc import Callable, Iterator
from ipaddress import ip_address
from itertools import count
from math import inf
from typing import TYPE_CHECKING

from ebpflb.agent.canary_sync import CanaryRefused, CanarySync, CanaryWish
from ebpflb.agent.inspection import Call
from ebpflb.model.addresses import Address
from ebpflb.model.events import Key
from ebpflb.plan.canary import CanaryLease
from tests.simulation.expected import Wrong
from tests.simulation.oracle import UNUSED, Served, View
from tests.simulation.places import (
    AT_LOOPBACK,
    FAMILIES,
    FRONTENDS,
    NODE_ADDRESS,
    NUMBERS,
    SENDERS,
    cluster_ip,
    of_family,
    version_of,
)

if TYPE_CHECKING:
    from tests.simulation.node import SimNode

LEASE = 2.0  # seconds
CLIENT, ENDPOINT = SENDERS[1], "198.18.0.3"  # its last byte: on this node
_BOTH = frozenset({"node", CLIENT.name})  # whom it serves, at its cluster IP


class Doctor:
    """``canary``: what it must find in the maps, as far as it has been told."""

    def __init__(self, node: "SimNode") -> None:
        self.node = node
        self.canary: View = {}
        self._lease: CanaryLease | None = None
        self._until = inf  # when the agent withdraws it
        self._leases = 0
        self._disturbed = False  # since then something has failed, or was put back
        self._numbers = count(1)
        self._over: tuple[View, View, View] = ({}, {}, {})

    # What it asks of the agent

    def begin(self, ip: int, port: int, nodeport: int) -> None:
        """It wants one of the cluster IPs from ``ip`` on that are unused."""
        addresses = tuple(
            (_address(CLIENT.address, v), _address(ENDPOINT, v), _address(NODE_ADDRESS, v))
            for v in FAMILIES
        )
        wish = CanaryWish(addresses, port, nodeport)
        self._order(lambda canary: self._begin(canary, wish, ip))

    def renew(self) -> None:
        self._order(self._renew)

    def end(self) -> None:
        self._order(self._end)

    def draw(self, below: int) -> int:
        """In place of random numbers: each but the first of a range is an address's last byte."""
        if below == 1:
            return 0
        last = next(self._numbers) % below
        canary = _frontends([cluster_ip(last - 1, v) for v in FAMILIES], *self._wanted)
        self.node.may_have([over(view, canary) for view in self._before])
        return last

    def token(self, size: int) -> str:
        """Likewise: the leases of a schedule have each a name of its own."""
        self._leases += 1
        return str(self._leases)

    def _order(self, do: Callable[[CanarySync], CanaryLease]) -> None:
        self.node.put(Call(lambda cluster, planner, canary: do(canary)))

    def _begin(self, canary: CanarySync, wish: CanaryWish, ip: int) -> CanaryLease:
        self._numbers, self._before = count(ip + 1), self.node.views
        self._wanted = wish.port, wish.nodeport
        held = canary.due < inf
        try:
            lease = canary.begin(wish)
        except CanaryRefused as refused:
            if not (held or self._may_refuse(wish)):
                raise Wrong(f"no canary: {refused}") from None
            raise
        self._lease, self._ports, self._disturbed = lease, self._wanted, False
        self._granted()
        return lease

    def _may_refuse(self, wish: CanaryWish) -> bool:
        """There are cluster IPs enough, and space."""
        life = self.node.life
        if not (life and life.health.ready and life.agent.cluster.service_cidrs):
            return True
        ports = {port for address, port, _ in self.node.known.view() if address in _NODE}
        return self._disturbed or wish.nodeport in ports

    def _renew(self, canary: CanarySync) -> CanaryLease:
        if self._lease is None:
            return CanaryLease("", [])
        try:
            canary.renew(self._lease.id)
        except CanaryRefused:
            if self.canary and not self._disturbed:
                raise Wrong("the canary is gone before its time") from None
            raise
        self._granted()
        return self._lease

    def _granted(self) -> None:
        assert self._lease
        self.canary = _frontends(self._lease.cluster_ips, *self._ports)
        self._until = self.node.now + LEASE

    def _end(self, canary: CanarySync) -> CanaryLease:
        lease = self._lease or CanaryLease("", [])
        self.forget()
        canary.end(lease.id)
        return lease

    # What becomes of it

    def forget(self) -> None:
        """It is withdrawn."""
        self.canary, self._lease, self._until = {}, None, inf

    def disturb(self) -> None:
        """Where all is written anew the canary is not."""
        self._disturbed = True

    def beside(self, view: View) -> list[View]:
        """What may be in force beside what Services ask for."""
        if self.node.now >= self._until:
            self.forget()
        if not self.canary:
            return [view]
        if self._over[0] is not view or self._over[1] is not self.canary:
            self._over = view, self.canary, over(view, self.canary)
        return [self._over[2], view] if self._disturbed else [self._over[2]]

    def all_is_written(self, *, has_canary: bool) -> None:
        """Nothing else than all that the agent had to write is in force."""
        if self._disturbed and not has_canary:
            self.forget()
        self._disturbed = False


_NODE = frozenset(of_family(NODE_ADDRESS, version) for version in FAMILIES)


def _address(address: str, version: int) -> Address:
    return ip_address(of_family(address, version))


def _frontends(cluster_ips: list[str], port: int, nodeport: int) -> View:
    return dict(
        entry
        for ip in cluster_ips
        for protocol in NUMBERS
        for entry in _of_protocol(ip, port, nodeport, protocol)
    )


def _of_protocol(
    ip: str, port: int, nodeport: int, protocol: str
) -> Iterator[tuple[tuple[str, int, str], Served]]:
    version = version_of(ip)
    places = frozenset({(of_family(ENDPOINT, version), port)})
    sid = Key("ebpflb_doctor", "canary"), protocol, version
    served = Served(sid, places, places, places, serving=places, used=places, has_any=True)
    yield (ip, port, protocol), served._replace(admits=_BOTH)
    at_node = served._replace(admits=frozenset({CLIENT.name}), external=True)
    yield (of_family(NODE_ADDRESS, version), nodeport, protocol), at_node


def over(view: View, canary: View) -> View:
    """The canary's frontends where no Service has them."""
    found = dict(view)
    for where, served in canary.items():
        if not (had := view.get(where)) or not had.is_there:
            found[where] = served
    addresses = {where[0]: served for where, served in canary.items()}
    for where in FRONTENDS:
        if found.get(where) is UNUSED and (canary_at := addresses.get(where[0])):
            found[where] = Served(canary_at.service, is_there=False)
    nodes = {at: (NODE_ADDRESS, *at[1:]) for at in AT_LOOPBACK}
    return found | {at: found[node] for at, node in nodes.items() if node in canary}
