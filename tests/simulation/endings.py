# SPDX-License-Identifier: Apache-2.0
"""Connections that the agent ends: which it may, and which it must have ended when all is quiet.

One of TCP through a Service that asks for it, when its endpoint has not been listed for the grace;
a connected UDP socket when its backend is not listed.
"""

from collections.abc import Hashable

from tests.simulation.expected import Views, Wrong
from tests.simulation.oracle import Served
from tests.simulation.places import Where, packed, spelled


class Endings:
    """``note`` is to be called for each open connection after each turn of the agent's."""

    def __init__(self) -> None:
        self.views = Views([{}])
        self._since: dict[Hashable, float] = {}  # connection -> when its endpoint was gone first
        self._graces: dict[Where, float] = {}  # the shortest that each frontend has ever had

    def expect(self, views: Views) -> None:
        self.views = views
        for where, served in (item for view in views.views for item in view.items()):
            if served.grace is not None:
                self._graces[where] = min(served.grace, self._graces.get(where, served.grace))

    def note(self, who: Hashable, where: Where, outcome: int, now: float) -> None:
        """It is gone as soon as one of the views that may be in force does not list it."""
        found = self.views.found(where)
        if found and all(each and _lists(each, outcome) for each in found):
            self._since.pop(who, None)
        else:
            self._since.setdefault(who, now)

    def may_end(self, who: Hashable, where: Where, now: float) -> bool:
        """Whether the agent may end it now."""
        grace = self._graces.get(where) if where[2] == "TCP" else 0.0
        since = self._since.get(who)
        return grace is not None and since is not None and now >= since + grace

    def judge(self, who: Hashable, where: Where, outcome: int, now: float) -> None:
        """The agent ends it now."""
        if not self.may_end(who, where, now):
            raise Wrong(f"a connection to {where} is ended, which {spelled(outcome)} may keep")

    def judge_open(self, where: Where, outcome: int) -> None:
        """It is still open, though nothing has happened for a while."""
        found = self.views.found(where)
        served = found[-1] if found else None
        if served is None or not served.is_there or _lists(served, outcome):
            return
        if served.grace is not None if where[2] == "TCP" else served.serving:
            raise Wrong(f"a connection to {where} stays with {spelled(outcome)}, which has gone")


def _lists(served: Served, outcome: int) -> bool:
    return any(packed(place) == outcome for place in served.serving)
