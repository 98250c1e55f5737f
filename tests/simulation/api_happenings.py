# SPDX-License-Identifier: Apache-2.0
"""The steps with an API server between cluster and agent, and its faults."""

from typing import TYPE_CHECKING

from ebpflb.model.events import Kind
from tests.simulation.api import ScriptedApi, ScriptedSource
from tests.simulation.happenings import KINDS, Happenings

if TYPE_CHECKING:
    from tests.simulation.node import SimNode


class ApiHappenings(Happenings):
    """Steps for the real source: ``deliver`` lets a watch's thread continue."""

    def __init__(self, node: "SimNode") -> None:
        super().__init__(node)
        self.api = ScriptedApi(node.cluster, node.clock)
        self.source: ScriptedSource | None = None

    def restart(self) -> None:
        self.api = ScriptedApi(self.node.cluster, self.node.clock)
        self.source = None

    def start(self) -> None:
        super().start()
        self.source = ScriptedSource(self.node.put, self.api)
        self.source.start()

    def stop(self) -> None:
        if self.source:
            self.source.stop()
        self.source = None

    def deliver(self, kind: int, count: int) -> None:
        for _ in range(count if self.source else 0):
            self.api.advance(KINDS[kind])

    def deliver_all(self) -> None:
        """Let the server work without faults."""
        self.api.refused.clear()
        for kind in Kind if self.source else ():
            while not self.api.is_current(kind) and self.api.advance(kind):
                pass

    @property
    def is_current(self) -> bool:
        return all(map(self.api.is_current, Kind))

    @property
    def awaits_list(self) -> bool:
        return bool(self.api.losing | self.api.has_lost)

    def relist(self, kind: int) -> None:
        """Answer 410 Gone in an open watch, or to the next one."""
        self.api.oldest[KINDS[kind]] = self.node.cluster.version + 1
        self.node.cluster.version += 1

    def lose(self, kind: int) -> None:
        """Break a connection."""
        self.api.lost.add(KINDS[kind])

    def hang(self, kind: int) -> None:
        """Let a watch send nothing more."""
        self.api.hung.add(KINDS[kind])

    def refuse(self, kind: int, times: int) -> None:
        """Let requests fail."""
        self.api.refused[KINDS[kind]] += times

    def expire(self, kind: int) -> None:
        """Let a list expire before it is read completely."""
        self.api.expired.add(KINDS[kind])

    def lose_event(self, kind: int) -> None:
        """Let a watch omit the next change, and continue."""
        self.api.losing.add(KINDS[kind])
