# SPDX-License-Identifier: Apache-2.0
"""Ranges of ports: which service port gets each of them, and the lists of each address's ranges.

A range is a frontend with its first port (``Frontend.is_range``); its last port stands beside it
(``Lasts``). A program finds the range of a port in the list of the address and protocol, which is
an entry of map services too (bpf/layout/port_range.h).
"""

from bisect import insort
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ebpflb.model.annotations import MOST_RANGES, PortRange
from ebpflb.model.services import PortName
from ebpflb.plan.entries import NO_LASTS, Frontend, Lasts, ServiceEntry, ranges_entry

Lists = Mapping[Frontend, Sequence[PortRange]]


class _Claim(NamedTuple):
    """A range that a service port wants; sorts by seniority."""

    created: str
    name: PortName
    port: int
    last: int
    frontend: Frontend

    @property
    def ports(self) -> PortRange:
        return PortRange(self.port, self.last)


class ContestedRange(NamedTuple):
    """A range that is not served, because ``owner`` has ports of it."""

    frontend: Frontend
    last: int
    owner: PortName
    name: PortName


# Of two ranges that overlap at an address, that of the older Service counts, as with frontends that
# several Services claim. At most MOST_RANGES ranges of an address and protocol fit.


class RangeClaims:
    """The ranges that service ports want, and which of them they get, by list of ranges."""

    def __init__(self) -> None:
        self._claims: dict[Frontend, list[_Claim]] = {}
        self._served: dict[Frontend, list[_Claim]] = {}
        self._contested: dict[Frontend, list[ContestedRange]] = {}
        self._lasts: dict[PortName, tuple[str, Lasts]] = {}

    def replace(self, name: PortName, created: str = "", lasts: Lasts = NO_LASTS) -> set[PortName]:
        """Replace the ranges of a service port; return the others that get more or less by it."""
        former = self._lasts.pop(name, ("", NO_LASTS))
        if lasts:
            self._lasts[name] = created, lasts
        gone, new = set(_claims(name, *former)), set(_claims(name, created, lasts))
        affected = set[PortName]()
        for at in {claim.frontend.ranges for claim in gone ^ new}:
            claims = [claim for claim in self._claims.pop(at, ()) if claim not in gone]
            for claim in new:
                if claim.frontend.ranges == at:
                    insort(claims, claim)
            affected |= self._serve(at, claims)
        return affected - {name}

    def has(self, name: PortName, frontend: Frontend) -> bool:
        """Whether the service port gets the range."""
        served = self._served.get(frontend.ranges, ())
        return any((each.name, each.frontend) == (name, frontend) for each in served)

    def rival(self, name: PortName, frontend: Frontend) -> PortName | None:
        """Return the service port whose range keeps this one from being served.

        None if the address has too many ranges.
        """
        ports = PortRange(frontend.port, self._lasts[name][1][frontend])
        served = self._served.get(frontend.ranges, ())
        return next((each.name for each in served if each.ports.overlaps(ports)), None)

    def contested(self) -> Iterator[ContestedRange]:
        """Yield the ranges that overlap with those of older Services."""
        for its in self._contested.values():
            yield from its

    def _serve(self, at: Frontend, claims: list[_Claim]) -> set[PortName]:
        """Select those that are served; return the service ports for which that has changed."""
        before, served, contested = self._served.pop(at, []), list[_Claim](), list[ContestedRange]()
        for claim in claims:
            rival = next((each for each in served if each.ports.overlaps(claim.ports)), None)
            if rival:
                contested.append(ContestedRange(claim.frontend, claim.last, rival.name, claim.name))
            elif len(served) < MOST_RANGES:
                served.append(claim)
        self._contested.pop(at, None)
        if contested:
            self._contested[at] = contested
        if claims:
            self._claims[at], self._served[at] = claims, served
        return {claim.name for claim in {*before} ^ {*served}}


def _claims(name: PortName, created: str, lasts: Lasts) -> Iterator[_Claim]:
    return (_Claim(created, name, it.port, last, it) for it, last in lasts.items())


# A list is written after the ranges that are new in it, and before those that it no longer has are
# removed. So a program that finds a range in it finds its service too. If another service gets a
# range that ends earlier than before, the list is written before that too, with the shorter range:
# otherwise the ports that it loses would lead to that service for a moment.


class ListChanges(NamedTuple):
    """The lists to write before the services of ``moved`` ranges, after all, and to remove."""

    moved: set[Frontend]
    early: list[tuple[Frontend, ServiceEntry]]
    written: list[tuple[Frontend, ServiceEntry]]
    removed: list[Frontend]


class RangeLists:
    """The planned lists of ranges; ``lists``: after the plan that is being made."""

    def __init__(self) -> None:
        self.lists: dict[Frontend, dict[int, int]] = {}  # list -> first port -> last port
        self._before: dict[Frontend, dict[int, int]] = {}  # those that are changed
        self._moved: set[Frontend] = set()  # ranges that pass from one service to another

    def load(self, lists: Lists, owned: Container[Frontend]) -> None:
        """Note the map's lists; the first plan removes ranges that no service port has."""
        for at, ranges in lists.items():
            self.lists[at] = dict(ranges)
            for frontend in last_ports({at: ranges}):
                if frontend not in owned:
                    self.remove(frontend)

    def replace(self, lasts: Lasts, moved: Iterable[Frontend]) -> None:
        """Note which ranges a service port gets; ``moved`` are those that another one had."""
        self._moved.update(moved)
        for frontend, last in lasts.items():
            if self.lists.get(frontend.ranges, {}).get(frontend.port) != last:
                self._changing(frontend.ranges)[frontend.port] = last

    def remove(self, frontend: Frontend) -> None:
        """Remove a range that no service port has any more."""
        if frontend.port in self.lists.get(frontend.ranges, {}):
            del self._changing(frontend.ranges)[frontend.port]

    def listed(self) -> Lists:
        """Return the ranges of each list, in the order of their ports."""
        return {at: _ranges(listed) for at, listed in self.lists.items()}

    def entry(self, at: Frontend) -> ServiceEntry:
        return _entry(self.lists[at])

    @property
    def has_changes(self) -> bool:
        return bool(self._before or self._moved)

    def take_changes(self) -> ListChanges:
        """Return the changes since the last call."""
        former, self._before = self._before, {}
        changes = ListChanges(self._moved, [], [], [])
        self._moved = set()
        for at, before in sorted(former.items(), key=str):
            now = self.lists[at]
            if not now:
                del self.lists[at]
                changes.removed.append(at)
                continue
            moved = {first for first in now if at._replace(port=first) in changes.moved}
            cut = now | {first: min(now[first], before.get(first, 0)) for first in moved}
            if any(cut[first] < before.get(first, 0) for first in moved):
                changes.early.append((at, _entry(cut)))
            changes.written.append((at, _entry(now)))
        return changes

    def _changing(self, at: Frontend) -> dict[int, int]:
        listed = self.lists.setdefault(at, {})
        self._before.setdefault(at, dict(listed))
        return listed


def _ranges(listed: Mapping[int, int]) -> list[PortRange]:
    return sorted(PortRange(*each) for each in listed.items())


def _entry(listed: Mapping[int, int]) -> ServiceEntry:
    return ranges_entry(_ranges(listed))


def last_ports(lists: Lists) -> Lasts:
    """Return the last port of each range in these lists."""
    return {at._replace(port=each.first): each.last for at, its in lists.items() for each in its}
