# SPDX-License-Identifier: Apache-2.0
"""Deliberate bugs in the lists and watches of the API, and in their use."""

from contextlib import contextmanager
from math import inf
from typing import Any
from unittest.mock import patch

from ebpflb.cluster import decoding
from ebpflb.cluster.decoding import ListMetadata
from ebpflb.cluster.list_watch import ANY, ListWatch
from ebpflb.cluster.source import Timing
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Replaced
from tests.simulation import api
from tests.simulation.write_mutations import Mutation


def versions_are_kept_over_410() -> Any:
    """The next watch asks for an expired version."""
    only_at_first = property(lambda self: not self._listed, lambda self, value: None)
    return patch.object(ListWatch, "_must_list", only_at_first, create=True)


def lists_only_add() -> Any:
    """An object that is missing from a new list stays."""

    def replace(self: ClusterState, event: Replaced) -> Any:
        self.listed.add(event.kind)
        return [w for k, found in event.objects.items() for w in self._change(event.kind, k, found)]

    return patch.object(ClusterState, "_replace", replace)


def only_the_first_page_is_read() -> Any:
    return patch.object(ListMetadata, "token", "")


def watches_do_not_move_on() -> Any:
    """After a break watches repeat past events, and removed objects come back."""

    def emit_line(self: ListWatch, line: Any) -> None:
        before = self._version
        _emit_line(self, line)
        self._version = before

    return patch.object(ListWatch, "_emit_line", emit_line)


_emit_line = ListWatch._emit_line


def a_silent_watch_is_left_alone() -> Any:
    """The watch is opened again only after an error."""
    return patch.object(api, "SILENCE", 1e9)


def nothing_is_listed_again() -> Any:
    """An event that a watch lost stays lost."""
    return patch.object(Timing, "list_seconds", lambda self: inf)


@contextmanager
def lists_may_be_older() -> Any:
    """Older events are emitted again."""
    asks_for_any = patch.object(ListWatch, "_which", lambda self: {"resourceVersion": ANY})
    with asks_for_any, patch.object(decoding, "is_older", lambda version, than: False):
        yield


OF_THE_API: list[Mutation] = [
    versions_are_kept_over_410, lists_only_add, only_the_first_page_is_read,
    watches_do_not_move_on, a_silent_watch_is_left_alone, nothing_is_listed_again,
    lists_may_be_older,
]  # fmt: skip
