# SPDX-License-Identifier: Apache-2.0
"""The backends that clients keep by session affinity."""

from collections.abc import Iterable

from tests.simulation.expected import Expected, Wrong
from tests.simulation.oracle import Sid
from tests.simulation.places import Where, spelled

Who = int | str
"""A network namespace, or the address of packets."""


class Affinity:
    """The rule that a client keeps its backend of a service, by any frontend, while the backend is
    in the list.
    """

    def __init__(self) -> None:
        self._has: dict[tuple[Who, Sid], int] = {}
        self._answered: set[Who] = set()

    def forget(self) -> None:
        self._has = {}

    def answered(self, who: Who) -> None:
        """Note that a client whose packets are translated was answered: this takes precedence over
        later unanswered choices (bpf/rules/affinity.h), so the client is not judged any more.
        """
        self._answered.add(who)

    def expect(self, expected: Iterable[Expected]) -> None:
        """Forget backends that no frontend of their service keeps any more."""
        if not self._has:
            return
        kept = {(sid, it) for each in expected for sid in each.services for it in each.sticky}
        self._has = {key: it for key, it in self._has.items() if (key[1], it) in kept}

    def judge(self, who: Who, where: Where, expected: Expected, outcome: int) -> None:
        """Check that ``outcome`` is allowed, and is the former backend while that is in the
        list.
        """
        if outcome < 0 or who in self._answered:
            return
        for service in expected.services:
            key = who, service
            before = self._has.get(key)
            if before is not None and before in expected.sticky and outcome != before:
                raise Wrong(f"{where}: affinity lost: {spelled(outcome)}, not {spelled(before)}")
            if outcome in expected.sticky:
                self._has[key] = outcome
            else:
                self._has.pop(key, None)
