# SPDX-License-Identifier: Apache-2.0
"""The entries of map cluster_ips: one for each address that internal frontends have.

An entry stays as long as any frontend has the address, on whatever port and of whatever service;
an address that passes from one service to another in one plan is not written at all. The covering
prefixes hold every cluster IP that ever was there, and so can be written before the entries.
"""

from collections.abc import Iterable

from ebpflb.model.addresses import Address, Family, Network
from ebpflb.plan.entries import Frontend, Prefix, ServiceEntry
from ebpflb.plan.prefixes import CoveringPrefixes


class ClusterIps:
    """``present``: the entries that the map has already."""

    def __init__(self, present: Iterable[Address] = ()) -> None:
        self.prefixes = CoveringPrefixes()
        self.frontends: set[Frontend] = set()
        self.counts: dict[Address, int] = {}  # of frontends
        self.was_present = dict.fromkeys(present, True)  # before the changes since take_changes

    def point(self, frontend: Frontend, service: ServiceEntry | None) -> None:
        """The frontend refers to this service from now on; None: it is removed."""
        internal = service is not None and "external" not in service.flags
        if internal == (frontend in self.frontends):
            return
        if internal:
            self.frontends.add(frontend)
            self._count_up(frontend.address)
        else:
            self.frontends.remove(frontend)
            self._count_down(frontend.address)

    def cover(self, networks: frozenset[Network]) -> dict[Family, Prefix]:
        """The covering prefixes: they hold all cluster IPs and all networks ever given to this.

        NO_PREFIX for a family that has none. They only grow, and are to be written before the plan
        that they belong to.
        """
        self.prefixes.add_all(networks)
        return self.prefixes.by_family()

    def take_changes(self) -> tuple[list[Address], list[Address]]:
        """The entries to add and to remove since the last call."""
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
