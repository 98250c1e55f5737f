# SPDX-License-Identifier: Apache-2.0
"""The entries of map services: which service port has which frontend.

If a frontend moves from one service port to another, its entry is overwritten, not removed. The
entries of map cluster_ips follow from the frontends (see ``ClusterIps``).
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ebpflb.entries.services import CoveringPrefixes, Frontend, Prefix, ServiceEntry, SourceRange
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.services import PortName
from ebpflb.plan.allocators import Quarantine

# The entries of map source_ranges: which clients restricted frontends admit.
#
# While a service is restricted, ranges that it no longer admits are removed at once. When it is no
# longer restricted its ranges stay until the quarantine ends, because a program may have read the
# service while it was restricted. No other service reads these ranges.

_Ranges = frozenset[SourceRange]


class SourceRangesSnapshot(NamedTuple):
    """The entries of the map at one time, and the number of removals until then."""

    ranges: Sequence[SourceRange]
    removals: int


class SourceRanges:
    """The planned entries of map source_ranges; ``present``: after the plan that is being made."""

    def __init__(self, capacity: int, quarantine: Quarantine) -> None:
        self.capacity, self.quarantine = capacity, quarantine
        self.present: set[SourceRange] = set()
        self.restricted: dict[int, _Ranges] = {}  # by id of the service
        self.quarantined: dict[int, _Ranges] = {}  # by id, of services that were restricted
        self.added: list[SourceRange] = []
        self.removed: set[SourceRange] = set()
        self.removals = 0

    def load(self, service_id: int, ranges: _Ranges) -> None:
        """Note ranges of a restricted service that the map already holds."""
        self.present |= ranges
        self.restricted[service_id] = ranges

    def load_leftovers(self, ranges: Iterable[SourceRange]) -> None:
        """Note ranges of no service that the map already holds.

        The first plan removes unneeded ones.
        """
        self.present.update(ranges)
        self.removed.update(ranges)

    @property
    def free(self) -> int:
        """The number of entries that still fit into the map."""
        return self.capacity - len(self.present)

    def change(self, service_id: int, ranges: _Ranges, *, restricted: bool) -> None:
        """Set the ranges of a service; they are empty unless it is restricted."""
        former = self.restricted.pop(service_id, _Ranges()) | self.quarantined.pop(
            service_id, _Ranges()
        )
        self.added += sorted(ranges - self.present, key=str)
        self.present |= ranges
        self.removed -= ranges
        if restricted:
            self.restricted[service_id] = ranges
            self.removed |= former - ranges
        elif former:
            self.quarantined[service_id] = former
            self.quarantine.add(partial(self._release, service_id, former))

    def remove(self, service_id: int) -> None:
        """Remove a deleted service; all its frontends are removed before its ranges."""
        self.removed |= self.restricted.pop(service_id, _Ranges())
        self.removed |= self.quarantined.pop(service_id, _Ranges())

    def snapshot(self) -> SourceRangesSnapshot:
        return SourceRangesSnapshot(tuple(self.present), self.removals)

    def take_changes(self) -> tuple[list[SourceRange], list[SourceRange]]:
        """Return the entries to add and to remove since the last call."""
        added, removed = self.added, sorted(self.removed, key=str)
        self.present -= self.removed
        self.removals += bool(removed)
        self.added, self.removed = [], set()
        return added, removed

    def _release(self, service_id: int, ranges: _Ranges) -> None:
        """Remove the ranges, unless the service has been restricted again meanwhile."""
        if self.quarantined.get(service_id) is ranges:
            self.removed |= self.quarantined.pop(service_id)


# The entries of map cluster_ips: one for each address of an internal frontend.
#
# An entry stays as long as any frontend has the address, on any port and of any service. If an
# address moves from one service to another within one plan, nothing is written. The covering
# prefixes hold every cluster IP that ever existed, so they can be written before the entries.


class ClusterIps:
    """The planned entries of map cluster_ips; ``present``: the entries that the map already has."""

    def __init__(self, present: Iterable[Address] = ()) -> None:
        self.prefixes = CoveringPrefixes()
        self.frontends: set[Frontend] = set()
        self.counts: dict[Address, int] = {}  # address -> number of frontends
        self.was_present = dict.fromkeys(present, True)  # before the changes since take_changes

    def point(self, frontend: Frontend, service: ServiceEntry | None) -> None:
        """Point the frontend to a service; None means the frontend is removed."""
        internal = service is not None and "external" not in service.flags
        if internal == (frontend in self.frontends):
            return
        if internal:
            self.frontends.add(frontend)
            self._count_up(frontend.address)
        else:
            self.frontends.remove(frontend)
            self._count_down(frontend.address)

    def cover(self, networks: frozenset[Network]) -> Mapping[Family, Prefix]:
        """Return prefixes that cover all cluster IPs and all networks ever passed to this function.

        NO_PREFIX for a family without any; the same object as long as nothing changes. The prefixes
        only grow, and must be written before the plan that they belong to.
        """
        self.prefixes.add_all(networks)
        return self.prefixes.by_family

    def take_changes(self) -> tuple[list[Address], list[Address]]:
        """Return the entries to add and to remove since the last call."""
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


class Frontends:
    """The owners of frontends.

    ``owners``: the service port of each frontend in map services, after the plan that is being
    made. ``removed``: the frontends that this plan removes from the map.
    """

    def __init__(self, capacity: int, cluster_ips: Iterable[Address] = ()) -> None:
        """``cluster_ips``: the entries that map cluster_ips has already."""
        self.capacity = capacity
        self.owners: dict[Frontend, PortName] = {}
        self.removed: set[Frontend] = set()
        self.cluster_ips = ClusterIps(cluster_ips)

    def load(self, name: PortName, services: Mapping[Frontend, ServiceEntry]) -> None:
        """Note entries of this service port that the map already holds."""
        self.owners.update(dict.fromkeys(services, name))
        for frontend, service in services.items():
            self.cluster_ips.point(frontend, service)

    def load_leftovers(self, frontends: Iterable[Frontend]) -> None:
        """Note frontends of no service port that the map already holds.

        The first plan removes unneeded ones.
        """
        self.removed.update(frontends)

    def has(self, frontend: Frontend) -> bool:
        """Whether the map has an entry for the frontend, of any service port.

        If so, the frontend needs no new entry.
        """
        return frontend in self.owners or frontend in self.removed

    @property
    def free(self) -> int:
        """The number of entries that still fit into the map."""
        return self.capacity - len(self.owners) - len(self.removed)

    def change(
        self,
        name: PortName,
        old: Mapping[Frontend, ServiceEntry],
        new: Mapping[Frontend, ServiceEntry],
    ) -> list[tuple[Frontend, ServiceEntry]]:
        """Replace the service port's entries ``old`` with ``new``; return the entries to write."""
        owner = self.owners.get
        written = [(f, s) for f, s in new.items() if old.get(f) != s or owner(f) != name]
        for frontend, service in written:
            self.cluster_ips.point(frontend, service)
        self.remove(name, old.keys() - new.keys())
        self.owners.update(dict.fromkeys(new, name))
        self.removed -= new.keys()
        return written

    def remove(self, name: PortName, frontends: Iterable[Frontend]) -> None:
        """Remove the frontends, except those that another service port has taken over meanwhile."""
        for frontend in frontends:
            if self.owners.get(frontend) == name:
                del self.owners[frontend]
                self.removed.add(frontend)
                self.cluster_ips.point(frontend, None)

    def take_removed(self) -> list[Frontend]:
        """Return the entries to remove since the last call."""
        removed, self.removed = sorted(self.removed, key=str), set()
        return removed
