# SPDX-License-Identifier: Apache-2.0
"""Which endpoints are set aside because connections from this node fail to open: the rules.

The programs count the failures (bpf/core/endpoint_health.h): three different clients, each of which
has reached the service port before, and no success in between. Then the endpoint gets no new
connections for FIRST_SECONDS, the next time for twice as long, up to LONGEST_SECONDS. A connection
that opens brings the endpoint back, with a clean record.

At most a third of a service port's endpoints are set aside, rounded up, and never the only one.
``endpoints.select`` uses an endpoint that is set aside if its list has no other, so a node never
loses its last one. An endpoint that the API takes away, or that is not ready, loses its record.
"""

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from msgspec import Struct

from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName

FIRST_SECONDS, LONGEST_SECONDS = 10.0, 300.0
PART = 3  # one in three endpoints may be set aside

Place = tuple[Address, int]
"""The address and port of an endpoint."""


class Outcome(NamedTuple):
    """What the programs have counted about an endpoint; ``has_opened`` came before ``has_failed``.

    ``has_failed``: connections of three clients have failed since the last one that opened.
    """

    port: PortName
    place: Place
    has_opened: bool
    has_failed: bool


class _Record(Struct):
    """``times``: how often it was set aside. ``until``: by the caller's clock; 0: in use again."""

    times: int = 0
    until: float = 0.0


class EndpointHealth:
    """The endpoints that were set aside, and are or have not been reached since.

    ``now`` is always the time of one monotonic clock, in seconds.
    """

    def __init__(self) -> None:
        self._records: defaultdict[PortName, dict[Place, _Record]] = defaultdict(dict)

    @property
    def ports(self) -> Collection[PortName]:
        """The service ports that have a record."""
        return self._records.keys()

    def set_aside(self, port: PortName) -> frozenset[Place]:
        """Return the endpoints of a service port that are set aside."""
        records = self._records.get(port, {})
        return frozenset(place for place, record in records.items() if record.until)

    def fails(self, port: PortName, place: Place, ready: Collection[Place], now: float) -> float:
        """Set an endpoint aside; return for how many seconds, 0 if it is not set aside now.

        ``ready`` are the endpoints of the service port that get connections by the API.
        """
        aside = self.set_aside(port)
        if place not in ready or place in aside or len(aside) >= most_set_aside(len(ready)):
            return 0.0
        record = self._records[port].setdefault(place, _Record())
        seconds = min(FIRST_SECONDS * 2.0**record.times, LONGEST_SECONDS)
        record.until = now + seconds
        record.times = min(record.times + 1, 30)
        return seconds

    def opens(self, port: PortName, place: Place) -> None:
        """Clear the endpoint's record: it is in use again."""
        self._forget(port, [place])

    def keep(self, port: PortName, ready: Collection[Place], now: float) -> None:
        """Forget all endpoints that are not ready; use those again whose time has ended.

        If too many of the others are set aside, those are used again whose time ends first.
        """
        self._forget(port, set(self._records.get(port, ())).difference(ready))
        aside = sorted(
            (it for it in self._records.get(port, {}).values() if it.until),
            key=lambda record: record.until,
        )
        too_many = max(len(aside) - most_set_aside(len(ready)), 0)
        for at, record in enumerate(aside):
            if at < too_many or record.until <= now:
                record.until = 0.0

    def _forget(self, port: PortName, places: Collection[Place]) -> None:
        records = self._records.get(port, {})
        for place in places:
            records.pop(place, None)
        if not records:
            self._records.pop(port, None)


def most_set_aside(ready: int) -> int:
    """Return how many endpoints may be set aside at once if ``ready`` are ready."""
    return 0 if ready < 2 else -(-ready // PART)
