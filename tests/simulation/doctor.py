# SPDX-License-Identifier: Apache-2.0
"""`ebpflb doctor` beside the agent: when its canary exists, and which clients it serves.

The canary has a NodePort of FRONTENDS while no Service has it. Clients of FRONTENDS therefore use
the canary: doctor's own, and others that it must not serve. A Service that claims the NodePort gets
it.
"""

from collections.abc import Callable
from ipaddress import ip_address
from math import inf
from typing import TYPE_CHECKING

from ebpflb.agent.canary_sync import CanaryRefused, CanarySync
from ebpflb.agent.loop import Call
from ebpflb.model.addresses import Address, Family
from ebpflb.model.events import Key
from ebpflb.plan.canary import ENDPOINT_PORT, CanaryLease
from tests.simulation.expected import Wrong
from tests.simulation.oracle import Served, View
from tests.simulation.places import AT_LOOPBACK, FAMILIES, NODE_ADDRESS, NUMBERS, SENDERS, of_family

if TYPE_CHECKING:
    from tests.simulation.node import SimNode

LEASE = 2.0  # seconds
CLIENT, ENDPOINT = SENDERS[1], "198.18.0.3"  # its last byte: on this node


def in_families(address: str) -> dict[Family, Address]:
    return {Family(version): ip_address(of_family(address, version)) for version in FAMILIES}


class Doctor:
    """``canary`` has the service ports that doctor must find in the maps, by the agent's
    answers.
    """

    def __init__(self, node: "SimNode") -> None:
        self.node = node
        self.canary: View = {}
        self._nodeport, self._id = 0, ""
        self._until = inf  # when the agent withdraws it
        self._leases = 0
        self._disturbed = False  # since then something has failed, or was put back
        self._over: tuple[View, View, View] = ({}, {}, {})

    # What it asks of the agent

    def begin(self, nodeport: int) -> None:
        """Start with this NodePort."""
        self._order(lambda canary: self._hold(canary, nodeport))

    def renew(self) -> None:
        if self._nodeport:
            self._order(lambda canary: self._hold(canary, self._nodeport))

    def end(self) -> None:
        self._order(self._end)

    def token(self, size: int) -> str:
        """Return the next name of a lease, instead of a random one."""
        self._leases += 1
        return str(self._leases)

    def _order(self, do: Callable[[CanarySync], CanaryLease]) -> None:
        self.node.put(Call(lambda: self._do(do)))

    def _do(self, do: Callable[[CanarySync], CanaryLease]) -> CanaryLease:
        assert self.node.life
        return do(self.node.life.canary)

    def _hold(self, canary: CanarySync, nodeport: int) -> CanaryLease:
        wanted = _frontends(nodeport)
        base = self.node.known.view()  # another NodePort replaces the present one
        views = self.node.views if nodeport == self._nodeport else [*self.node.views, base]
        self.node.may_have([base, *(over(view, wanted) for view in views)])
        try:
            lease = canary.hold(nodeport)
        except CanaryRefused as refused:
            if not self._may_refuse(nodeport):
                raise Wrong(f"no canary: {refused}") from None
            raise
        if lease.id != self._id:
            self._id, self._disturbed = lease.id, False
        self.canary, self._nodeport, self._until = wanted, nodeport, self.node.now + LEASE
        return lease

    def _may_refuse(self, nodeport: int) -> bool:
        """Whether the agent may refuse; it may not if there is space and no Service has the
        NodePort.
        """
        life = self.node.life
        if not (life and life.health.ready):
            return True
        ports = {port for address, port, _ in self.node.known.view() if address in _NODE}
        return self._disturbed or nodeport in ports

    def _end(self, canary: CanarySync) -> CanaryLease:
        self.forget()
        canary.withdraw()
        return CanaryLease("")

    # What becomes of it

    def forget(self) -> None:
        """Note that the canary is withdrawn."""
        self.canary, self._nodeport, self._until = {}, 0, inf

    def disturb(self) -> None:
        """Note that everything may be written again, without the canary."""
        self._disturbed = True

    def beside(self, view: View) -> list[View]:
        """Return what may be in force in addition to the Services."""
        if self.node.now >= self._until:
            self.forget()
        if not self.canary:
            return [view]
        if self._over[0] is not view or self._over[1] is not self.canary:
            self._over = view, self.canary, over(view, self.canary)
        return [self._over[2], view] if self._disturbed else [self._over[2]]

    def all_is_written(self, *, has_canary: bool) -> None:
        """Note that exactly the entries that the agent had to write are in force."""
        if self._disturbed and not has_canary:
            self.forget()
        self._disturbed = False


_NODE = frozenset(of_family(NODE_ADDRESS, version) for version in FAMILIES)


def _frontends(nodeport: int) -> View:
    return dict(_frontend(nodeport, protocol, v) for v in FAMILIES for protocol in NUMBERS)


def _frontend(nodeport: int, protocol: str, version: int) -> tuple[tuple[str, int, str], Served]:
    places = frozenset({(of_family(ENDPOINT, version), ENDPOINT_PORT)})
    sid = Key("ebpflb_doctor", "canary"), protocol, version
    served = Served(sid, places, places, places, serving=places, used=places, has_any=True)
    at_node = served._replace(admits=frozenset({CLIENT.name}), external=True)
    return (of_family(NODE_ADDRESS, version), nodeport, protocol), at_node


def over(view: View, canary: View) -> View:
    """Return the views with the canary's NodePorts added if no Service has them."""
    found = dict(view)
    for where, served in canary.items():
        if not (had := view.get(where)) or not had.is_there:
            found[where] = served
    nodes = {at: (NODE_ADDRESS, *at[1:]) for at in AT_LOOPBACK}
    return found | {at: found[node] for at, node in nodes.items() if node in canary}
