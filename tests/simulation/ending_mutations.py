# SPDX-License-Identifier: Apache-2.0
"""Deliberate bugs in how flows, counts and connections end."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from ebpflb.agent import stale as agent_stale
from ebpflb.agent.missed_ends import EndedConnections
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.agent.stale import SearchWorker
from ebpflb.entries.flows import Expired, Timeouts
from ebpflb.kernel.maps import sweep
from ebpflb.kernel.maps.sweep import FLOW_MAPS, SweptTable
from ebpflb.kernel.stale import Ended, SocketEnder
from ebpflb.plan.stale import Ends, Resets, Stale, Watched
from tests.simulation.write_mutations import Mutation


@contextmanager
def sweeps_take_open_flows() -> Iterator[None]:
    """Timeouts are zero, and not shared with other schedules."""
    with (
        patch.object(Timeouts, "_nanoseconds", lambda self, protocol, found: 0),
        patch.object(sweep, "_idle_limits", sweep._idle_limits.__wrapped__),
    ):
        yield


def sweeps_leave_flows() -> Any:
    """One entry of each flow is forgotten."""

    def end(self: SweptTable, flow: Expired) -> Any:
        return _end(self, flow._replace(entries=dict(list(flow.entries.items())[:-1])))

    return patch.object(SweptTable, "_end", end)


_end = SweptTable._end


def forgotten_connections_stay_counted() -> Any:
    """Connections whose flow a sweep has deleted stay counted."""
    return patch.object(EndedConnections, "sweep", lambda self: 0)


def open_sockets_count_as_ended() -> Any:
    """Only flows are searched, so open sockets count as ended."""

    def remembered(self: EndedConnections, name: str) -> Any:
        return _referenced_keys(self, name) if name in FLOW_MAPS else []

    return patch.object(EndedConnections, "_referenced_keys", remembered)


_referenced_keys = EndedConnections._referenced_keys


def kept_connections_are_reset() -> Any:
    """The Service's setting is ignored."""

    def take(self: ServiceSync) -> Any:
        taken = _take(self)
        for name, change in taken.items():
            if change is None and name in self.planner.actual:
                frontends = frozenset(self.planner.claims.frontends_of(name))
                listed = frozenset(b.endpoint for b in self.planner.actual[name].backends)
                taken[name] = Watched(0.0, frontends, listed)
        return taken

    return patch.object(ServiceSync, "take_watched", take)


_take, _update = ServiceSync.take_watched, Resets.update


def the_grace_is_ignored() -> Any:
    def update(self: Resets, name: Any, change: Any, now: float) -> bool:
        at_once = change._replace(grace=0.0) if isinstance(change, Watched) else change
        return _update(self, name, at_once, now)

    return patch.object(Resets, "update", update)


def connections_to_gone_endpoints_stay() -> Any:
    return patch.object(Resets, "find", lambda self, names, endpoint, now: None)


def stale_sockets_stay() -> Any:
    """Stale UDP sockets are not ended."""
    return patch.object(SocketEnder, "end", lambda self, judge, protocols: Ended())


def failed_deletions_are_given_up() -> Any:
    return patch.object(SearchWorker, "_fail", lambda self, taken, reason: None)


def stale_flows_of_conntrack_stay() -> Any:
    return patch.object(agent_stale, "delete_entries", lambda *_, **__: Ended())


def what_serves_is_stale() -> Any:
    """Every connection to a frontend counts as stale."""
    return patch.object(Stale, "ends", lambda self, frontend, endpoint, is_socket=False: Ends.ALL)


def what_was_removed_is_not_known() -> Any:
    """At a frontend that is in no map nothing counts as stale."""
    return patch.object(Stale, "_was_removed", lambda self, frontend, endpoint: False)


OF_ENDINGS: list[Mutation] = [
    sweeps_take_open_flows, sweeps_leave_flows,
    forgotten_connections_stay_counted,
    open_sockets_count_as_ended, kept_connections_are_reset, the_grace_is_ignored,
    connections_to_gone_endpoints_stay, stale_sockets_stay,
    failed_deletions_are_given_up, stale_flows_of_conntrack_stay,
    what_serves_is_stale, what_was_removed_is_not_known,
]  # fmt: skip
