# SPDX-License-Identifier: Apache-2.0
"""Who gets a frontend: the service that was there first.

Two services may name the same external address, protocol and port. kube-proxy leaves the winner
undefined (kube-proxy.md 4); here the older service keeps it, then the one first by name, so that
a newcomer cannot take traffic away and the result does not depend on the order of events.
"""

from collections.abc import Iterator, Mapping

from ebpflb.model.services import PortName
from ebpflb.plan.desired_service import DesiredService
from ebpflb.plan.entries import Flags, Frontend


class Claims:
    """All that is desired, and which of it each service port gets."""

    def __init__(self) -> None:
        self.desired: dict[PortName, DesiredService] = {}
        self.claimants: dict[Frontend, list[PortName]] = {}

    def update(self, changes: Mapping[PortName, DesiredService | None]) -> set[PortName]:
        """Takes in the changes (None: gone); the names whose entries may have to change."""
        affected = set(changes)
        for name, desired in changes.items():
            affected |= self._withdraw(name)
            if desired is not None:
                affected |= self._claim(desired)
        return affected

    def frontends_of(self, name: PortName) -> dict[Frontend, Flags]:
        """The frontends that a service port may have."""
        desired = self.desired.get(name)
        frontends = desired.frontends.items() if desired else ()
        return {f: flags for f, flags in frontends if self.claimants[f][0] == name}

    def conflicts(self) -> Iterator[tuple[Frontend, list[PortName]]]:
        """Frontends that several service ports claim, the winner first."""
        return ((f, names) for f, names in self.claimants.items() if len(names) > 1)

    def _withdraw(self, name: PortName) -> set[PortName]:
        former = self.desired.pop(name, None)
        rivals: set[PortName] = set()
        for frontend in former.frontends if former else ():
            names = self.claimants[frontend]
            names.remove(name)
            rivals.update(names[:1])
            if not names:
                del self.claimants[frontend]
        return rivals

    def _claim(self, desired: DesiredService) -> set[PortName]:
        self.desired[desired.name] = desired
        rivals: set[PortName] = set()
        for frontend in desired.frontends:
            names = self.claimants.setdefault(frontend, [])
            rivals.update(names[:1])
            names.append(desired.name)
            names.sort(key=self._seniority)
        return rivals

    def _seniority(self, name: PortName) -> tuple[str, PortName]:
        return self.desired[name].created, name
