# SPDX-License-Identifier: Apache-2.0
"""Which service port gets a frontend that several of them claim: that of the oldest Service.

Two Services may list the same external address, protocol and port. kube-proxy leaves the winner
undefined (kube-proxy.md 4). Here the older Service gets it, of equally old ones the first by name:
so a new Service cannot take traffic away, and the order of events does not matter.
"""

from collections.abc import Mapping

from ebpflb.model.services import PortName
from ebpflb.plan.desired_service import DesiredService
from ebpflb.plan.entries import Flags, Frontend


class Claims:
    """The desired state of all service ports; each desired frontend is a claim to it."""

    def __init__(self) -> None:
        self.desired: dict[PortName, DesiredService] = {}
        self.claimants: dict[Frontend, list[PortName]] = {}
        # Of these the frontends that several claim, the winner first.
        self.contested: dict[Frontend, list[PortName]] = {}

    def update(self, changes: Mapping[PortName, DesiredService | None]) -> set[PortName]:
        """Applies changes (None: deleted); returns the names whose frontends may be others now."""
        affected = set(changes)
        for name, desired in changes.items():
            affected |= self._withdraw(name)
            if desired is not None:
                affected |= self._claim(desired)
        return affected

    def frontends_of(self, name: PortName) -> dict[Frontend, Flags]:
        """The frontends that a service port claims and gets."""
        desired = self.desired.get(name)
        frontends = desired.frontends.items() if desired else ()
        return {f: flags for f, flags in frontends if self.claimants[f][0] == name}

    def _withdraw(self, name: PortName) -> set[PortName]:
        former = self.desired.pop(name, None)
        rivals: set[PortName] = set()
        for frontend in former.frontends if former else ():
            names = self.claimants[frontend]
            names.remove(name)
            rivals.update(names[:1])
            if len(names) < 2:
                self.contested.pop(frontend, None)
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
            if len(names) > 1:
                self.contested[frontend] = names
        return rivals

    def _seniority(self, name: PortName) -> tuple[str, PortName]:
        return self.desired[name].created, name
