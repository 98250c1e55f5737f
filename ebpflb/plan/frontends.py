# SPDX-License-Identifier: Apache-2.0
"""The entries of map services: which service port has which frontend.

A frontend may pass from one service port to another: its entry is then overwritten, not removed.
The entries of map cluster_ips follow from the frontends (see ``ClusterIps``).
"""

from collections.abc import Iterable, Mapping

from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.cluster_ips import ClusterIps
from ebpflb.plan.entries import Frontend, ServiceEntry


class Frontends:
    """``owners``: the service port of each frontend in map services, after the plan that is being
    made. ``removed``: the frontends that this plan removes from the map.
    """

    def __init__(self, capacity: int, cluster_ips: Iterable[Address] = ()) -> None:
        """``cluster_ips``: the entries that map cluster_ips has already."""
        self.capacity = capacity
        self.owners: dict[Frontend, PortName] = {}
        self.removed: set[Frontend] = set()
        self.udp_moved = False  # some UDP frontend has passed from one service port to another
        self._given_up: set[Frontend] = set()  # UDP frontends that no service port has any more
        self.cluster_ips = ClusterIps(cluster_ips)

    def load(self, name: PortName, services: Mapping[Frontend, ServiceEntry]) -> None:
        """The map has these entries already, of this service port."""
        self.owners.update(dict.fromkeys(services, name))
        for frontend, service in services.items():
            self.cluster_ips.point(frontend, service)

    def load_leftovers(self, frontends: Iterable[Frontend]) -> None:
        """The map has these too, of no service port; the first plan removes those not needed."""
        self.removed.update(frontends)

    def has(self, frontend: Frontend) -> bool:
        """Whether the map has an entry for it, of whichever service port: it needs no new one."""
        return frontend in self.owners or frontend in self.removed

    @property
    def free(self) -> int:
        """How many more entries the map has space for."""
        return self.capacity - len(self.owners) - len(self.removed)

    def change(
        self,
        name: PortName,
        old: Mapping[Frontend, ServiceEntry],
        new: Mapping[Frontend, ServiceEntry],
    ) -> list[tuple[Frontend, ServiceEntry]]:
        """The service port has the entries ``new`` instead of ``old``; returns those to write."""
        owner = self.owners.get
        written = [(f, s) for f, s in new.items() if old.get(f) != s or owner(f) != name]
        for frontend, service in written:
            self.cluster_ips.point(frontend, service)
        self.udp_moved |= any(self._passes_on(f, name) for f, _ in written)
        self._given_up.difference_update(new)
        self.remove(name, old.keys() - new.keys())
        self.owners.update(dict.fromkeys(new, name))
        self.removed -= new.keys()
        return written

    def take_udp_moved(self) -> bool:
        """Whether any has since the last call."""
        moved, self.udp_moved = self.udp_moved, False
        return moved

    def _passes_on(self, frontend: Frontend, to: PortName) -> bool:
        return frontend.protocol == Protocol.UDP and (
            frontend in self._given_up or self.owners.get(frontend, to) != to
        )

    def remove(self, name: PortName, frontends: Iterable[Frontend]) -> None:
        """Except those that another service port has taken over meanwhile."""
        for frontend in frontends:
            if self.owners.get(frontend) == name:
                del self.owners[frontend]
                self.removed.add(frontend)
                if frontend.protocol == Protocol.UDP and len(self._given_up) < self.capacity:
                    self._given_up.add(frontend)
                self.cluster_ips.point(frontend, None)

    def take_removed(self) -> list[Frontend]:
        """The entries to remove since the last call."""
        removed, self.removed = sorted(self.removed, key=str), set()
        return removed
