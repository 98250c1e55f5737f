# SPDX-License-Identifier: Apache-2.0
"""Mistakes made on purpose in how flows, counts and connections end."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from ebpflb.agent.missed_ends import EndedConnections
from ebpflb.agent.on_removal.reset_worker import ResetCounts, ResetWorker
from ebpflb.agent.on_removal.resets import FlowConnections
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.agent.stale_udp import conntrack_worker
from ebpflb.agent.stale_udp.conntrack_worker import StaleConnections, StaleConnectionsWorker
from ebpflb.agent.stale_udp.lookups import ServedFrontends
from ebpflb.agent.stale_udp.socket_search import Counts, SocketEnder
from ebpflb.entries.flows import Expired, Timeouts
from ebpflb.kernel.maps import occupancy, sweep
from ebpflb.kernel.maps.sweep import FLOW_MAPS, SweptTable
from ebpflb.model.annotations import OnRemoval
from ebpflb.model.endpoints import Selection
from ebpflb.model.services import ServicePort
from ebpflb.plan.removed_endpoints import RemovedEndpoints, Watched
from tests.simulation.write_mutations import Mutation


@contextmanager
def sweeps_take_open_flows() -> Iterator[None]:
    """At once; neither are the right times at hand from another schedule, nor are these left."""
    with (
        patch.object(Timeouts, "_nanoseconds", lambda self, protocol, found: 0),
        patch.object(sweep, "_idle_limits", sweep._idle_limits.__wrapped__),
    ):
        yield


def sweeps_leave_flows() -> Any:
    """One entry of each is forgotten."""

    def end(self: SweptTable, flow: Expired) -> Any:
        return _end(self, flow._replace(entries=dict(list(flow.entries.items())[:-1])))

    return patch.object(SweptTable, "_end", end)


_end = SweptTable._end


def forgotten_connections_stay_counted() -> Any:
    """Connections whose flow a sweep has deleted stay counted."""
    return patch.object(EndedConnections, "sweep", lambda self: 0)


def counts_outlive_what_was_counted() -> Any:
    """Of the maps that count, only one that has lost its pin is made again."""
    return patch.object(occupancy, "renew_if_lost", lambda state, specs: None)


def open_sockets_count_as_ended() -> Any:
    """Only flows are looked through."""

    def remembered(self: EndedConnections, name: str) -> Any:
        return _referenced_keys(self, name) if name in FLOW_MAPS else []

    return patch.object(EndedConnections, "_referenced_keys", remembered)


_referenced_keys = EndedConnections._referenced_keys


def kept_connections_are_reset() -> Any:
    """Whatever a Service says."""

    def watch(self: ServiceSync, port: ServicePort, selection: Selection) -> Any:
        kept = port.on_removal.reset_after is None
        on_removal = OnRemoval(0.0) if kept else port.on_removal
        return _watch(self, replace(port, on_removal=on_removal), selection)

    return patch.object(ServiceSync, "_watch", watch)


_watch = ServiceSync._watch


def the_grace_is_ignored() -> Any:
    def update(self: RemovedEndpoints, name: Any, change: Any, now: float) -> bool:
        at_once = change._replace(grace=0.0) if isinstance(change, Watched) else change
        return _update(self, name, at_once, now)

    return patch.object(RemovedEndpoints, "update", update)


_update = RemovedEndpoints.update


def connections_to_gone_endpoints_stay() -> Any:
    return patch.object(ResetWorker, "_reset", lambda self, gone, is_last: None)


def flows_to_gone_endpoints_stay() -> Any:
    """Sockets alone are ended."""
    return patch.object(FlowConnections, "reset", lambda self, wanted, is_last: ResetCounts())


def stale_sockets_stay() -> Any:
    """Stale sockets of datagrams stay."""
    return patch.object(SocketEnder, "end", lambda self, stale: (Counts(), stale))


def failed_deletions_are_given_up() -> Any:
    """Failed deletions of stale flows in conntrack are given up."""
    return patch.object(StaleConnectionsWorker, "_fail", lambda self, taken, reason: None)


def stale_flows_of_conntrack_stay() -> Any:
    return patch.multiple(
        StaleConnections,
        delete=lambda self, candidates: Counts(),
        delete_all=lambda self, removed: Counts(),
    )


def flows_of_serving_backends_are_deleted() -> Any:
    """Whatever leads to a frontend."""
    return patch.object(conntrack_worker._Serving, "lacks_backend_of", lambda self, entry: True)


def sockets_of_serving_backends_are_stale() -> Any:
    return patch.object(ServedFrontends, "is_stale", lambda self, entry: True)


OF_ENDINGS: list[Mutation] = [
    counts_outlive_what_was_counted, sweeps_take_open_flows, sweeps_leave_flows,
    forgotten_connections_stay_counted,
    open_sockets_count_as_ended, kept_connections_are_reset, the_grace_is_ignored,
    connections_to_gone_endpoints_stay, flows_to_gone_endpoints_stay, stale_sockets_stay,
    failed_deletions_are_given_up, stale_flows_of_conntrack_stay,
    flows_of_serving_backends_are_deleted, sockets_of_serving_backends_are_stale,
]  # fmt: skip
