# SPDX-License-Identifier: Apache-2.0
"""Checks after a quiet time."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from typing import TYPE_CHECKING, Any

from ebpflb.history.records import latest_changes
from ebpflb.kernel.attach.tcx import TCX_HOOKS
from ebpflb.kernel.maps.readers import RememberedSockets
from ebpflb.kernel.maps.sweep import FLOW_MAPS
from ebpflb.kernel.programs.loader import SECTIONS
from ebpflb.model.events import Kind
from ebpflb.model.services import Protocol
from ebpflb.plan.canary import NAMESPACE as CANARIES
from ebpflb.plan.planner import Planner
from ebpflb.serve.conditions import not_ready
from tests.plan.node import PlannedNode, check_tidy, not_programmed
from tests.plan.simulation import Maps
from tests.simulation.agent import Life
from tests.simulation.cluster import read
from tests.simulation.expected import Wrong

if TYPE_CHECKING:
    from tests.simulation.node import SimNode


LONG = 1e6  # seconds, after which no flow stays


def check(node: "SimNode", life: Life) -> None:
    """Run all checks. Raises Wrong, or AssertionError, for a failed check."""
    for kind in Kind:
        listed = dict(read(kind, each) for each in node.cluster.objects[kind].values())
        wanted = {key: found.object for key, found in listed.items()}
        if node.known.objects.get(kind) != wanted:
            raise Wrong(f"the agent does not know the newest {kind}")
    if not life.health.ready or not life.health.serves:
        raise Wrong(f"not ready: {not_ready(life.publisher.status)}, serves: {life.health.serves}")
    node.clients.judge_open()
    node.tracked.judge_open()
    _check_hooks(node)
    _check_maps(node, life)
    _check_history(life)
    _check_sweeps(node, life)
    _check_counts(node, life)


def _check_hooks(node: "SimNode") -> None:
    for section, hook in SECTIONS.items():
        if not node.kernel.link_at(node.cgroup, hook.attach_type):
            raise Wrong(f"nothing runs at {section}")
    pinned = {opened.id for opened in node.kernel.pins.values()}
    for index, attach_type in product(node.kernel.devices, TCX_HOOKS.values()):
        link = node.kernel.link_at(index, attach_type)
        if link is None or link.id not in pinned:
            raise Wrong(f"nothing that is pinned runs at device {index}")


def _check_maps(node: "SimNode", life: Life) -> None:
    """Check that the maps equal those written from nothing, and pass the audit."""
    planner, datapath = life.service_sync.planner, life.datapath
    if not_programmed(planner):
        raise Wrong(f"not programmed: {not_programmed(planner)}")
    found = contents(datapath.maps)
    fresh = Maps()
    made = Planner(datapath.capacity)
    fresh.write_all(made.plan_everything(dict(planner.claims.desired), 0.0))
    if found.view() != fresh.view():
        raise Wrong("the maps are not what is planned")
    found.translations = node.table.translations
    planned = PlannedNode(datapath.capacity)
    planned.maps, planned.planner = found, planner
    planned.nameless = found.wanted_translations().keys() - found.backend_names.keys()
    check_tidy(planned)
    if not life.netfilter.active:
        raise Wrong("netfilter does not serve")
    if drift := [each for drifts in life.maps_check.steps() for each in drifts]:
        raise Wrong(f"the audit finds {drift}")
    if datapath.maps["settings"].get(0).writes % 2:
        raise Wrong("a write has not ended")


def _check_history(life: Life) -> None:
    """Check that the changes since this agent's start lead to the present endpoints.

    Changes of doctor's canary are left out: once its name is removed from the maps, its former
    endpoints are unknown.
    """
    told = defaultdict(set, life.endpoints_at_start)
    changes = latest_changes(life.options.paths, None, None, 0).changes
    for service in (service for change in changes for service in change.services):
        told[service.service].difference_update(service.endpoints_removed)
        told[service.service].update(service.endpoints_added)
    now = life.endpoints()
    names = {name for name in {*told, *now} if not name.startswith(f"{CANARIES}/")}
    if differs := [name for name in names if told.get(name) != now.get(name, set())]:
        raise Wrong(f"the history tells otherwise of {differs}")


def _check_sweeps(node: "SimNode", life: Life) -> None:
    """Check that open flows stay, and that sweeps leave no unused flows."""
    life.sweep(node.library.lib.end_flow)
    node.look()
    node.clients.packets.forget()
    life.sweep(node.library.lib.end_flow, later=LONG)
    for name in FLOW_MAPS:
        if left := list(life.datapath.maps[name].items()):
            raise Wrong(f"sweeps leave {left}")


def _check_counts(node: "SimNode", life: Life) -> None:
    """Check that open connections are counted exactly, as long as any map has an entry about
    them.
    """
    counted = _counted(life)
    clients = node.clients
    sockets = {client.cookie for client in (*clients.streams, *clients.datagrams)}
    _end_connections(node, life)
    if lost := (counted - _counted(life)) & sockets:
        raise Wrong(f"connections of open sockets count as ended: {lost}")
    clients.release()
    if left := _counted(life) & sockets:
        raise Wrong(f"sockets were closed, and are counted: {left}")
    _end_connections(node, life)
    if left := _counted(life):
        raise Wrong(f"connections have ended, and are counted: {left}")


def _end_connections(node: "SimNode", life: Life) -> None:
    """End connections that two sweeps do not find; compare the counts before and after."""
    _check_loads(life)
    life.ended.end = node.library.lib.end_connection
    life.ended.sweep()
    life.ended.sweep()
    _check_loads(life)


def _counted(life: Life) -> set[int]:
    """Return cookies of sockets, and numbers of flows."""
    return {socket for socket, *_ in _connections(life)}


def _connections(life: Life) -> list[tuple[int, int, int]]:
    """Return for each connection the socket's cookie or the flow's number, the backend, and the
    backend's generation.
    """
    maps = life.datapath.maps
    return [
        *((key.socket, it.backend, it.generation) for key, it in maps["connections"].items()),
        *(
            (cookie, entry.peer.backend, entry.counted - 1)
            for cookie, entry in RememberedSockets(maps).items()
            if entry.counted and entry.peer.frontend.protocol == Protocol.TCP
        ),
    ]


def _check_loads(life: Life) -> None:
    """Check that a backend's open connections equal the elements that name it."""
    named = Counter((backend, generation) for _, backend, generation in _connections(life))
    for id, load in _written(life.datapath.maps["backend_loads"]):
        if load.open != named[id, load.generation]:
            raise Wrong(f"backend {id}: {load.open} connections, not {named[id, load.generation]}")


def contents(maps: Mapping[str, Any]) -> Maps:
    """Return the kernel's maps as dicts."""
    found = Maps()
    for name in ("services", "service_names", "backend_names", "source_ranges", "cluster_ips"):
        getattr(found, name).update(maps[name].items())
    found.slots.update(_written(maps["slots"]))
    found.choices.update(_written(maps["choices"]))
    slots = maps["backend_slots"]
    found.backend_slots.update(
        dict.fromkeys(range(slots.spec.entries), slots.value.unpack(bytes(slots.size)))
    )
    found.backend_slots.update(_written(slots))
    return found


def _written(array: Any) -> Iterator[tuple[int, Any]]:
    """Return the elements that are not all zeros."""
    stride, size = array.stride, array.size
    memory, zeros = array.memory[0 : array.spec.entries * stride], bytes(size)
    for index in range(array.spec.entries):
        if memory[index * stride : index * stride + size] != zeros:
            yield index, array.get(index)
