# SPDX-License-Identifier: Apache-2.0
"""What a fresh list of the cluster's objects asks for, against what the maps hold; nothing is
written.

It is what an agent would plan that starts now: where the maps are as they should be, nothing.
"""

import time
from dataclasses import replace
from queue import Empty, SimpleQueue

from ebpflb.agent.parts import cluster_state, make_source
from ebpflb.errors import ClusterError
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Changed, Event, Removed, Replaced, SourceStatus
from ebpflb.options import Options
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.canary import is_canary
from ebpflb.plan.desired_service import desired_service
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.plan import Plan
from ebpflb.plan.planner import Planner
from ebpflb.plan.service_entries import NO_ENTRIES
from ebpflb.plan.slow_starts import SlowStarts
from ebpflb.serve.metrics import Metrics

LIST_SECONDS = 30.0


def listed(options: Options) -> ClusterState:
    """The state of the cluster by a fresh list.

    Raises ClusterError if the lists are not complete within LIST_SECONDS, with the last reason.
    """
    cluster, inbox = cluster_state(options), SimpleQueue[Event]()
    source = make_source(options, inbox.put, Metrics())
    until, reason = time.monotonic() + LIST_SECONDS, "no answer"
    source.start()
    try:
        while not cluster.complete:
            try:
                message = inbox.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                raise ClusterError(f"{options.source} cannot be listed: {reason}") from None
            if isinstance(message, Replaced | Changed | Removed):
                cluster.apply(message)
            elif isinstance(message, SourceStatus):
                reason = message.error or reason
    finally:
        source.stop()
    return cluster


def missing_plan(cluster: ClusterState, contents: MapContents, capacity: Capacity) -> Plan:
    """What would have to be written for the maps to be as the cluster asks.

    `ebpflb doctor`'s canary, which no object asks for, stays.
    """
    starts, now = SlowStarts(), time.monotonic()
    desired = {
        port.name: starts.apply(
            desired_service(port, selection, cluster.primary),
            port.slow_start,
            contents.entries.get(port.name, NO_ENTRIES),
            now,
        )
        for key in sorted(cluster.services)
        for port, selection in cluster.ports(key)
    }
    planner = Planner(capacity, _without_canary(contents))
    return planner.plan_everything(desired, now)


def _without_canary(contents: MapContents) -> MapContents:
    canaries = [it for name, it in contents.entries.items() if is_canary(name)]
    addresses = {frontend.address for each in canaries for frontend in each.services}
    entries = {name: it for name, it in contents.entries.items() if not is_canary(name)}
    return replace(contents, entries=entries, cluster_ips=contents.cluster_ips - addresses)
