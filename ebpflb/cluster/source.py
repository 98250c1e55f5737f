# SPDX-License-Identifier: Apache-2.0
"""The interface of every source, which is all that the agent needs, and how a source is made.

The two sources are ``api_source.ApiSource`` and ``manifests.ManifestSource``. Each emits
every kind first as ``Replaced``, then as ``Changed`` and ``Removed``; ApiSource sometimes as
``Replaced`` again.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from ebpflb.model.events import Event, Together

Emit = Callable[[Event | Together], None]
"""Takes an event from any thread and returns soon, such as a queue's ``put``."""

Observe = Callable[[str, str, int | None, float], None]
"""Receives method, URL and status of each request to an API server, and the seconds until its
answer began.

The status is None without an answer.

Called from any thread.
"""


def unobserved(method: str, url: str, code: int | None, seconds: float) -> None:
    """An ``Observe`` that does nothing."""


class Source(Protocol):
    """A source: started once, stopped once; in between it emits events from its threads."""

    def received(self) -> Mapping[str, float]:
        """Return when the source last sent anything, by kind of object or for all kinds together.

        The times are in seconds since the epoch; a kind that never arrived is missing. May be
        called from any thread.
        """

    def prepare(self) -> None:
        """Check the configuration.

        Raises ClusterError if it cannot work at all; changes nothing.
        """

    def start(self) -> None:
        """Begin to emit. Raises ClusterError if the configuration cannot work at all."""

    def stop(self) -> None:
        """Stop emitting; the threads end within about a second."""


def make_source(emit: Emit, *, node_name: str, manifests: Path | None, **api: Any) -> Source:
    """Return the source of the cluster's objects, not yet started.

    ``api``: the arguments of ApiSource, for which ``manifests`` is None. Only the source in use
    is imported.
    """
    if manifests is not None:
        from ebpflb.cluster.manifests import ManifestSource

        return ManifestSource(emit, directory=manifests, node_name=node_name)
    from ebpflb.cluster.api_source import ApiSource

    return ApiSource(emit, node_name=node_name, **api)
