# SPDX-License-Identifier: Apache-2.0
"""Mistakes made on purpose in the lists and watches of the API, and in what they are used for."""

from typing import Any
from unittest.mock import patch

from ebpflb.agent.objects_check import ObjectsCheck
from ebpflb.cluster.decoding import ListMetadata
from ebpflb.cluster.position import Position
from ebpflb.model import agreement
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Replaced
from tests.simulation import api
from tests.simulation.write_mutations import Mutation


def versions_are_kept_over_410() -> Any:
    """The next watch asks for what is gone."""
    return patch.object(Position, "restart", lambda self: None)


def lists_only_add() -> Any:
    """What is not in a list any more stays."""

    def replace(self: ClusterState, event: Replaced) -> Any:
        self.listed.add(event.kind)
        return [w for k, found in event.objects.items() for w in self._change(event.kind, k, found)]

    return patch.object(ClusterState, "_replace", replace)


def only_the_first_page_is_read() -> Any:
    return patch.object(ListMetadata, "token", "")


def watches_do_not_move_on() -> Any:
    """After a break they tell again what is past, and removed objects come back."""

    def emit(self: Position, event: Any, version: str) -> None:
        _emit(self, event, version if isinstance(event, Replaced) else "")

    return patch.object(Position, "emit", emit)


_emit = Position.emit


def a_silent_watch_is_left_alone() -> Any:
    """It is opened anew only where an error ends it."""
    return patch.object(api, "SILENCE", 1e9)


def fresh_lists_are_not_compared() -> Any:
    """What a watch has lost stays lost."""
    return patch.object(agreement, "difference", lambda *_: None)


def lost_events_are_only_named() -> Any:
    return patch.object(ObjectsCheck, "repair", lambda self: None)


OF_THE_API: list[Mutation] = [
    versions_are_kept_over_410, lists_only_add, only_the_first_page_is_read,
    watches_do_not_move_on, a_silent_watch_is_left_alone, fresh_lists_are_not_compared,
    lost_events_are_only_named,
]  # fmt: skip
