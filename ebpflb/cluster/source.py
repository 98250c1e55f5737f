# SPDX-License-Identifier: Apache-2.0
"""What every source can do, and all that the agent needs to know of one.

The two are ``api_source.ApiSource`` and ``manifest_source.ManifestSource``. Each emits every kind
once as ``Replaced``, later ``Changed`` and ``Removed``; an object that stays equal gives no event.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

from ebpflb.model.events import Event, Key, Kind, ReadObject

Emit = Callable[[Event], None]
"""Takes an event from any thread and returns soon, such as a queue's ``put``."""

Observe = Callable[[str, str, int | None, float], None]
"""Receives method, URL and status of each request to an API server, and the seconds until its
answer began; the status is None if none came. It is called from any thread.
"""


def unobserved(method: str, url: str, code: int | None, seconds: float) -> None:
    """An ``Observe`` that does nothing."""


Objects = Mapping[Key, ReadObject]


class FreshList(Protocol):
    """Of one kind. All methods are called by one thread, and none waits."""

    kind: Kind

    @property
    def restarting(self) -> bool:
        """Whether ``distrust`` was called, and what it asks for is not done yet."""

    def begin(self) -> bool:
        """Begins a list; False where there is nothing yet that it could be compared with."""

    def page(self) -> Objects | None:
        """The next objects; None: not yet. Empty after the last ones. Raises ClusterError."""

    def changed(self) -> Set[Key] | None:
        """Those of which something was emitted since ``begin``; None: of all of them."""

    def distrust(self) -> None:
        """The source is to list and watch anew."""

    def end(self) -> None:
        """Ends the list, which may have been read in part."""


class Source(Protocol):
    """Started once, stopped once; in between it emits events from threads of its own."""

    def received(self) -> Mapping[str, float]:
        """When the source last sent anything, by kind of object or for all alike: in seconds since
        the epoch. What never came is not in it. May be called from any thread.
        """

    def prepare(self) -> None:
        """Raises ClusterError if what was configured cannot work at all; nothing is changed."""

    def start(self) -> None:
        """Begin to emit. Raises ClusterError if what was configured cannot work at all."""

    def fresh_lists(self) -> Sequence[FreshList]:
        """How what was emitted can be compared with the source; none where the source itself reads
        all of it anew from time to time.
        """

    def stop(self) -> None:
        """Emit no more; the threads end within about a second."""
