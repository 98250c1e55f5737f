# SPDX-License-Identifier: Apache-2.0
"""Who gets a frontend: the service that was there first.

Two services may name the same external address, protocol and port. kube-proxy leaves the winner
undefined (kube-proxy.md 4); here the older service keeps it, then the one first by name, so that
a newcomer cannot take traffic away and the result does not depend on the order of events.
"""

from collections.abc import Iterator, Mapping

from ebpflb.model.services import PortName
from ebpflb.plan.entries import Flags, Frontend
from ebpflb.plan.wanted import Wanted


class Claims:
    """All that is wanted, and which of it each service port gets."""

    def __init__(self) -> None:
        self.wanted: dict[PortName, Wanted] = {}
        self.claimants: dict[Frontend, list[PortName]] = {}

    def update(self, changes: Mapping[PortName, Wanted | None]) -> set[PortName]:
        """Takes in the changes (None: gone); the names whose entries may have to change."""
        affected = set(changes)
        for name, wanted in changes.items():
            affected |= self._withdraw(name)
            if wanted is not None:
                affected |= self._claim(wanted)
        return affected

    def granted(self, name: PortName) -> dict[Frontend, Flags]:
        """The frontends that a service port may have."""
        wanted = self.wanted.get(name)
        frontends = wanted.frontends.items() if wanted else ()
        return {f: flags for f, flags in frontends if self.claimants[f][0] == name}

    def disputes(self) -> Iterator[tuple[Frontend, list[PortName]]]:
        """Frontends that several service ports claim, the winner first."""
        return ((f, names) for f, names in self.claimants.items() if len(names) > 1)

    def _withdraw(self, name: PortName) -> set[PortName]:
        former = self.wanted.pop(name, None)
        rivals: set[PortName] = set()
        for frontend in former.frontends if former else ():
            names = self.claimants[frontend]
            names.remove(name)
            rivals.update(names[:1])
            if not names:
                del self.claimants[frontend]
        return rivals

    def _claim(self, wanted: Wanted) -> set[PortName]:
        self.wanted[wanted.name] = wanted
        rivals: set[PortName] = set()
        for frontend in wanted.frontends:
            names = self.claimants.setdefault(frontend, [])
            rivals.update(names[:1])
            names.append(wanted.name)
            names.sort(key=self._seniority)
        return rivals

    def _seniority(self, name: PortName) -> tuple[str, PortName]:
        return self.wanted[name].created, name
