# SPDX-License-Identifier: Apache-2.0
"""The weights of endpoints that are new to a service port with a slow start, as time goes on.

An endpoint is new where others of the service port were in use already when it came. It begins with
a tenth of its weight, and gets another tenth with each ninth of the time. Where nothing was in use,
as at the first start of an agent or of a Service, all begin with the whole.

What was in use before an agent's start is what the maps hold: an endpoint with a part of its
weight goes on from there, for the weight says how far it was. An endpoint that was not ready and
comes back is new.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from msgspec import structs

from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName
from ebpflb.plan.desired import DesiredBackend, DesiredService
from ebpflb.plan.service_entries import NO_ENTRIES, ServiceEntries, used_lists

TENTHS = 10  # from a tenth to the whole


SLOTS_PER_TURN = 131_072  # slots and places of tables that are written anew; at least one service


TURN_SECONDS = 1.0


_Endpoint = tuple[Address, int]


class Growth(NamedTuple):
    """Of one service port: in how many seconds weights grow, and since when those that do."""

    seconds: float
    used: frozenset[_Endpoint]
    since: Mapping[_Endpoint, float]

    def step(self, endpoint: _Endpoint, now: float) -> int:
        """From 1 to TENTHS: so many tenths of the weight."""
        grown = (now - self.since[endpoint]) / self.seconds * (TENTHS - 1)
        return min(TENTHS, 1 + int(grown + 1e-9))

    def next_step(self, now: float) -> float:
        """When the next weight grows; infinity: none does."""
        a_step = self.seconds / (TENTHS - 1)
        times = (since + self.step(at, now) * a_step for at, since in self.since.items())
        return min(times, default=math.inf)


class SlowStarts:
    """Times are in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._growths: dict[PortName, Growth] = {}
        self._next: dict[PortName, float] = {}  # when the next weight of a service port grows
        self._not_before = -math.inf

    @property
    def due(self) -> float:
        """When ``take_due`` returns something; infinity: never, as it is."""
        return max(min(self._next.values(), default=math.inf), self._not_before)

    def forget(self, name: PortName) -> None:
        self._growths.pop(name, None)
        self._next.pop(name, None)

    def apply(
        self, desired: DesiredService, seconds: float, programmed: ServiceEntries, now: float
    ) -> DesiredService:
        """With the weights that its backends have now; ``programmed``: what the maps hold of it."""
        if not seconds:
            self.forget(desired.name)
            return desired
        former = self._growths.get(desired.name) or _from_maps(desired, programmed, seconds, now)
        lists = used_lists(desired.frontends.values())
        backends = {each.endpoint for each in desired.backends if each.flags & lists}
        new = backends - former.used if former.used else set()
        since = {at: then for at, then in former.since.items() if at in backends}
        growth = Growth(seconds, frozenset(backends), since | dict.fromkeys(new, now))
        growing = {at: then for at, then in growth.since.items() if growth.step(at, now) < TENTHS}
        growth = self._growths[desired.name] = growth._replace(since=growing)
        self._next[desired.name] = growth.next_step(now)
        if not growing:
            del self._next[desired.name]
        return _weighted(desired, growth, now)

    def take_due(self, cost: Mapping[PortName, ServiceEntries], now: float) -> list[PortName]:
        """Whose weights are to be applied anew, those first that have waited longest.

        No more than SLOTS_PER_TURN are rewritten for them in TURN_SECONDS: the rest waits.
        """
        if now < self.due:
            return []
        found: list[PortName] = []
        left = SLOTS_PER_TURN
        for then, name in sorted((then, name) for name, then in self._next.items()):
            entries = cost.get(name, NO_ENTRIES)
            left -= entries.block.size + entries.tables.size
            if then > now or (found and left < 0):
                break
            found.append(name)
        self._not_before = now + TURN_SECONDS
        return found


def desired_in_force(desired: DesiredService, former: DesiredService | None) -> DesiredService:
    """With the weights of the former backends: to compare everything else."""
    weights = {each.endpoint: each.weight for each in former.backends} if former else {}
    return _with_weights(desired, weights)


def _from_maps(
    desired: DesiredService, programmed: ServiceEntries, seconds: float, now: float
) -> Growth:
    """Of a service port that was not seen before: by the weights in the maps."""
    whole = {each.endpoint: each.weight for each in desired.backends}
    lists = programmed.used_lists
    used = {each.endpoint: each.weight for each in programmed.backends if each.flags & lists}
    since = {
        at: now - seconds * (max(1, round(TENTHS * weight / whole[at])) - 1) / (TENTHS - 1)
        for at, weight in used.items()
        if weight < whole.get(at, 0)
    }
    return Growth(seconds, frozenset(used), since)


def _weighted(desired: DesiredService, growth: Growth, now: float) -> DesiredService:
    weights = {each.endpoint: each.weight for each in desired.backends}
    parts = {at: max(1, weights[at] * growth.step(at, now) // TENTHS) for at in growth.since}
    return _with_weights(desired, parts)


def _with_weights(desired: DesiredService, weights: Mapping[_Endpoint, int]) -> DesiredService:
    if not weights:
        return desired
    backends = [_with_weight(each, weights.get(each.endpoint)) for each in desired.backends]
    return replace(desired, backends=tuple(backends))


def _with_weight(backend: DesiredBackend, weight: int | None) -> DesiredBackend:
    return backend if weight is None else structs.replace(backend, weight=weight)
