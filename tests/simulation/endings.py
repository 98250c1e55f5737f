# SPDX-License-Identifier: Apache-2.0
"""Connections that the agent may end, and those that it must have ended at the end.

These are TCP connections of a Service with on-removal, when their endpoint has not been listed for
the grace; and UDP connections whose backend is not listed, also because this agent knew their
Service or port before its deletion.
"""

from collections.abc import Hashable

from tests.simulation.expected import Views, Wrong
from tests.simulation.oracle import Served
from tests.simulation.places import Where, packed, spelled


class Endings:
    """The open connections; call ``note`` for each of them after each turn of the agent."""

    def __init__(self) -> None:
        self.views = Views([{}])
        self._since: dict[Hashable, float] = {}  # connection -> when its endpoint was gone first
        self._graces: dict[Where, float] = {}  # the shortest that each frontend has ever had
        self._known: set[Hashable] = set()  # connections that this agent's objects list
        self._is_complete = False

    def agent_begins(self) -> None:
        """Note a new agent, which knows nothing of earlier removed frontends."""
        self._known, self._is_complete = set(), False

    def agent_is_complete(self) -> None:
        """Note that the agent knows all objects, and has written them."""
        self._is_complete = True

    def expect(self, views: Views) -> None:
        self.views = views
        for where, served in (item for view in views.views for item in view.items()):
            if served.grace is not None:
                self._graces[where] = min(served.grace, self._graces.get(where, served.grace))

    def note(self, who: Hashable, where: Where, outcome: int, now: float) -> None:
        """Note a connection as gone once one of the views that may be in force no longer lists
        it.
        """
        found = self.views.found(where)
        if found and all(each and _lists(each, outcome) for each in found):
            self._since.pop(who, None)
            if self._is_complete:
                self._known.add(who)
        else:
            self._since.setdefault(who, now)

    def may_end(self, who: Hashable, where: Where, now: float) -> bool:
        """Whether the agent may end the connection now."""
        grace = self._graces.get(where) if where[2] == "TCP" else 0.0
        since = self._since.get(who)
        return grace is not None and since is not None and now >= since + grace

    def judge(self, who: Hashable, where: Where, outcome: int, now: float) -> None:
        """Check that the agent may end the connection now."""
        if not self.may_end(who, where, now):
            raise Wrong(f"a connection to {where} is ended, which {spelled(outcome)} may keep")

    def judge_open(self, who: Hashable, where: Where, outcome: int) -> None:
        """Check that the connection may still be open after a quiet time."""
        found = self.views.found(where)
        served = found[-1] if found else None
        if served and served.is_there:
            if _lists(served, outcome) or (where[2] == "TCP" and served.grace is None):
                return
            if not served.serving and outcome == packed(where[:2]):
                return
        elif where[2] == "TCP" or who not in self._known:
            return
        raise Wrong(f"a connection to {where} stays with {spelled(outcome)}, which has gone")


def _lists(served: Served, outcome: int) -> bool:
    return any(packed(place) == outcome for place in served.serving)
