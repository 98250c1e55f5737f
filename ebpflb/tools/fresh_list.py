# SPDX-License-Identifier: Apache-2.0
"""Compare a fresh list of the cluster's objects with the maps, without writing.

The result is the plan of an agent that starts now: empty if the maps are correct.
"""

import math
import time
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ebpflb.errors import ClusterError
from ebpflb.model import endpoints
from ebpflb.model.addresses import Address
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.endpoints import finished
from ebpflb.model.events import Changed, Event, Kind, Removed, Replaced, SourceStatus, Together
from ebpflb.model.services import PortName
from ebpflb.options import Options
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.canary import is_canary
from ebpflb.plan.desired import DesiredService, desired_service, not_made
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.planner import Plan, Planner
from ebpflb.plan.service_entries import NO_ENTRIES, ServiceEntries, SlowStarts, existing
from ebpflb.plan.space import Shares

LIST_SECONDS = 30.0
NONE: Set[PortName] = frozenset()


def listed(options: Options) -> ClusterState:
    """Return the state of the cluster by a fresh list.

    Raises ClusterError, with the last reason, if the lists are not complete within LIST_SECONDS,
    and as soon as a list that is needed is forbidden.
    """
    cluster = ClusterState(
        options.node_name, bind_address=options.bind_address, admission=options.admission
    )
    if options.manifests:
        from ebpflb.cluster.manifests import ManifestDirectory

        for event in ManifestDirectory(options.manifests, options.node_name).scan():
            _apply(cluster, event)
    else:
        _list_by_api(cluster, options)
    return cluster


def _list_by_api(cluster: ClusterState, options: Options) -> None:
    from ebpflb.cluster.api import API_PATHS
    from ebpflb.cluster.api_servers import ApiServers
    from ebpflb.cluster.api_source import ApiSource
    from ebpflb.cluster.list_watch import NEWEST

    inbox = SimpleQueue[Event | Together]()
    source = ApiSource(
        inbox.put,
        node_name=options.node_name,
        kubeconfig=options.kubeconfig,
        master=options.master,
        servers=ApiServers(options.api_servers, are_several=options.keeps_api_servers),
        first_version=NEWEST,
    )
    until, reason = time.monotonic() + LIST_SECONDS, "no answer"
    not_needed = API_PATHS[Kind.SERVICE_CIDR]
    source.start()
    try:
        while not cluster.complete:
            try:
                event = inbox.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                raise ClusterError(f"{options.source} cannot be listed: {reason}") from None
            _apply(cluster, event)
            if isinstance(event, SourceStatus):
                reason = event.error or reason
                if event.is_forbidden and not event.source.endswith(not_needed):
                    until = -math.inf
    finally:
        source.stop()


def _apply(cluster: ClusterState, event: Event | Together) -> None:
    if isinstance(event, Replaced | Changed | Removed):
        cluster.apply(event)


class Missing(NamedTuple):
    """The writes that would make the maps match the cluster.

    ``entries`` are those that each service port would then have.
    """

    plan: Plan
    entries: dict[PortName, ServiceEntries]


def missing(
    cluster: ClusterState,
    contents: MapContents,
    capacity: Capacity,
    shares: Shares,
    but: Set[PortName] = NONE,
) -> Missing:
    """Return the difference for all service ports except these and `ebpflb doctor`'s canary."""
    canaries = set(filter(is_canary, contents.entries))
    planner = Planner(capacity, _without(contents, but | canaries), shares)
    desired = {it.name: it for it in _desired(cluster, planner, but)}
    return Missing(planner.plan_everything(desired, time.monotonic()), planner.actual)


def _desired(
    cluster: ClusterState, planner: Planner, but: Set[PortName]
) -> Iterator[DesiredService]:
    """Yield what the agent would make of each service port except these."""
    starts, now = SlowStarts(), time.monotonic()
    for key in sorted(cluster.services):
        slices = cluster.slices_of_ports(key)
        for port in (it for it in cluster.services[key] if it.name not in but):
            its = endpoints.of_port(slices, port.name)
            entries = planner.actual.get(port.name, NO_ENTRIES)
            lack = planner.admit(port, endpoints.count(its, port.name))
            if lack and not entries.id:
                yield not_made(port, lack)
                continue
            selection = finished(cluster.selecting(port.name, its))
            made = desired_service(port, selection, cluster.primary, api=cluster.api_places)
            made = starts.apply(made, port.slow_start, entries, now)
            yield existing(made, entries, lack) if lack else made


def _without(contents: MapContents, but: Set[PortName]) -> MapContents:
    """Return the contents without these service ports and the addresses that only they have."""
    entries = {name: it for name, it in contents.entries.items() if name not in but}
    gone = _addresses(it for name, it in contents.entries.items() if name in but)
    gone -= _addresses(entries.values())
    return replace(contents, entries=entries, cluster_ips=contents.cluster_ips - gone)


def _addresses(entries: Iterable[ServiceEntries]) -> set[Address]:
    return {frontend.address for each in entries for frontend in each.services}
