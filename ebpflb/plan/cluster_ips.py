# SPDX-License-Identifier: Apache-2.0
"""The cluster IPs that frontends stand for, and what map cluster_ips must gain and lose for them.

A cluster IP is there as long as a frontend of it is, whatever the port and whoever owns it: what
one service drops and another takes up in the same plan is not written at all. The span holds
every one that ever was there, and so can be written before them.
"""

from collections.abc import Iterable

from ebpflb.model.addresses import Address
from ebpflb.plan.entries import Frontend, Service
from ebpflb.plan.prefixes import CoveringPrefixes


class ClusterIps:
    """``present`` is what the map holds already."""

    def __init__(self, present: Iterable[Address] = ()) -> None:
        self.prefixes = CoveringPrefixes()
        self.frontends: set[Frontend] = set()
        self.counts: dict[Address, int] = {}  # of frontends
        self.was_present = dict.fromkeys(present, True)  # of each that may have come or gone

    def point(self, frontend: Frontend, service: Service | None) -> None:
        """The frontend leads to this service from now on, or to none."""
        internal = service is not None and "external" not in service.flags
        if internal == (frontend in self.frontends):
            return
        if internal:
            self.frontends.add(frontend)
            self._count_up(frontend.address)
        else:
            self.frontends.remove(frontend)
            self._count_down(frontend.address)

    def take_changes(self) -> tuple[list[Address], list[Address]]:
        """What the map must gain and what it must lose since the last time."""
        changed, self.was_present = self.was_present, {}
        added = [ip for ip, present in changed.items() if not present and ip in self.counts]
        return added, [ip for ip, present in changed.items() if present and ip not in self.counts]

    def _count_up(self, address: Address) -> None:
        count = self.counts.get(address, 0)
        self.counts[address] = count + 1
        if not count:
            self.was_present.setdefault(address, False)
            self.prefixes.add(address)

    def _count_down(self, address: Address) -> None:
        self.counts[address] -= 1
        if not self.counts[address]:
            self.was_present.setdefault(address, True)
            del self.counts[address]
