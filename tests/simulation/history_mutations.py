# SPDX-License-Identifier: Apache-2.0
"""Deliberate bugs in the record of changes."""

from typing import Any
from unittest.mock import patch

from ebpflb.agent.service_sync import ServiceSync
from ebpflb.history.records import Before, History
from ebpflb.plan.service_entries import NO_ENTRIES
from tests.simulation.write_mutations import Mutation


def deletions_are_not_recorded() -> Any:
    def commit(self: History, before: Before, now: Before, *, keep: bool = False) -> None:
        left = {name: old for name, old in before.items() if name in now}
        _commit(self, left, now, keep=keep)

    return patch.object(History, "commit", commit)


_commit = History.commit


def what_a_failed_write_has_changed_is_forgotten() -> Any:
    def start_over(self: ServiceSync) -> None:
        self._changed.clear()
        _start_over(self)

    return patch.object(ServiceSync, "_start_over", start_over)


_start_over = ServiceSync._start_over


def changes_begin_with_nothing() -> Any:
    """A service port's former endpoints are unknown."""

    def commit(self: History, before: Before, now: Before, *, keep: bool = False) -> None:
        _commit(self, dict.fromkeys(before, NO_ENTRIES), now, keep=keep)

    return patch.object(History, "commit", commit)


OF_THE_HISTORY: list[Mutation] = [
    deletions_are_not_recorded,
    what_a_failed_write_has_changed_is_forgotten,
    changes_begin_with_nothing,
]
