# SPDX-License-Identifier: Apache-2.0
"""Which backends of UDP service ports a write has removed, and what serves instead of them."""

from collections.abc import Iterable
from typing import NamedTuple

from ebpflb.model.services import Protocol
from ebpflb.plan.service_entries import BackendChange


class RemovedBackends(NamedTuple):
    """The ids of backends that were removed from UDP service ports.

    ``replaced``: other backends serve the port now. ``orphaned``: no backend does, and sockets
    keep the removed one until another comes. ``served_again``: some port has a backend that had
    none before. ``moved``: a frontend has passed to another service port, with other backends.
    """

    replaced: frozenset[int] = frozenset()
    orphaned: frozenset[int] = frozenset()
    served_again: bool = False
    moved: bool = False

    def __bool__(self) -> bool:
        return any(self)

    def __or__(self, other: "RemovedBackends") -> "RemovedBackends":
        replaced, orphaned = self.replaced | other.replaced, self.orphaned | other.orphaned
        served_again, moved = self.served_again or other.served_again, self.moved or other.moved
        return RemovedBackends(replaced, orphaned, served_again, moved)


def removed_backends(changes: Iterable[BackendChange]) -> RemovedBackends:
    """What these changes of service ports removed."""
    replaced, orphaned, served_again = set[int](), set[int](), False
    for name, former_ids, new_ids, _ in changes:
        if name.protocol == Protocol.UDP:
            removed = set(former_ids).difference(new_ids)
            (replaced if new_ids else orphaned).update(removed)
            served_again |= bool(new_ids) and not former_ids
    return RemovedBackends(frozenset(replaced), frozenset(orphaned), served_again)
