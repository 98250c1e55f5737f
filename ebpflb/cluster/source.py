# SPDX-License-Identifier: Apache-2.0
"""What every source can do, and all that the agent needs to know of one.

The two are ``api_source.ApiSource`` and ``manifest_source.ManifestSource``. Each emits every kind
first as ``Replaced``, then as ``Changed`` and ``Removed``; ApiSource sometimes as ``Replaced``.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

from ebpflb.model.events import Event

Emit = Callable[[Event], None]
"""Takes an event from any thread and returns soon, such as a queue's ``put``."""

Observe = Callable[[str, str, int | None, float], None]
"""Receives method, URL and status of each request to an API server, and the seconds until its
answer began; the status is None if none came. It is called from any thread.
"""


def unobserved(method: str, url: str, code: int | None, seconds: float) -> None:
    """An ``Observe`` that does nothing."""


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

    def stop(self) -> None:
        """Emit no more; the threads end within about a second."""
