# SPDX-License-Identifier: Apache-2.0
"""A product that is broken on purpose does not get through: the simulation finds each mistake."""

from collections.abc import Callable, Iterator
from dataclasses import Field, fields, replace
from itertools import chain
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import structs

from ebpflb.agent import service_sync
from ebpflb.agent.audit_checks import HooksCheck
from ebpflb.agent.ended_connections import EndedConnections
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.cluster.decoding import ListMetadata
from ebpflb.cluster.position import Position
from ebpflb.datapath import map_writer
from ebpflb.datapath.attach.held_links import HeldLinks
from ebpflb.datapath.map_writer import MapWriter
from ebpflb.datapath.maps.sweep import FLOW_MAPS, FlowTable
from ebpflb.model import cluster_state, nodeport_addresses, services
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Replaced
from ebpflb.model.selection import Selection, uses_cluster, uses_local
from ebpflb.model.services import ServicePort
from ebpflb.plan import desired_service, tables
from ebpflb.plan.expiry import Timeouts
from ebpflb.plan.plan import Plan
from ebpflb.plan.planner import Planner
from tests.simulation import api
from tests.simulation.schedules import Runner
from tests.simulation.steps import changing_policies, draw, draw_api

MOST = 500  # schedules until it must be found

Mutation = Callable[[], Any]


def _in_order(order: Callable[[list[Field[Any]]], list[Field[Any]]]) -> Any:
    return patch.object(map_writer, "fields", lambda plan: order(list(fields(plan))))


def frontends_before_slots() -> Any:
    """The order of writes is swapped."""
    return _in_order(lambda parts: sorted(parts, key=lambda part: part.name != "services"))


def deleted_before_created() -> Any:
    """A frontend is removed, and then written with its new service."""

    def apply(self: MapWriter, plan: Plan) -> None:
        self.maps["services"].delete([frontend for frontend, _ in plan.services])
        _apply(self, plan)

    return patch.object(MapWriter, "apply", apply)


_apply = MapWriter.apply


def names_of_removed_backends_stay() -> Any:
    """A kind of entry is never removed."""
    return _in_order(lambda parts: [p for p in parts if p.name != "removed_backend_names"])


def services_deleted_while_away_stay() -> Any:
    """A new agent forgets to remove what it does not know."""
    return patch.object(Planner, "plan_everything", Planner.plan_changes)


def a_failed_write_counts_as_written() -> Any:
    """The maps are not read again after a failure."""

    def write(self: ServiceSync) -> None:
        self.must_start_over = False
        _write(self)

    return patch.object(ServiceSync, "write", write)


_write = ServiceSync.write


def removed_backends_keep_their_slot() -> Any:
    """Affinity and sockets would find them for ever."""
    return patch.object(Planner, "_free_backend_id", lambda self, id: None)


def removed_slices_are_ignored() -> Any:
    return patch.object(ClusterState, "_remove_slice", lambda self, key: None)


def hooks_are_not_put_back() -> Any:
    return patch.object(HooksCheck, "repair", lambda self: None)


def links_are_not_held() -> Any:
    """A pin that is removed detaches its program."""
    return patch.object(HeldLinks, "hold", lambda self, pins: None)


def nothing_marks_a_write() -> Any:
    """The count of writes is odd for ever after an agent has died while it wrote."""
    return patch.object(map_writer, "_written", lambda settings, frontends_move: settings)


def ranges_are_forgotten() -> Any:
    """A new agent narrows the span of cluster IPs until it has the list."""
    return patch.object(MapWriter, "service_ranges", lambda self: [])


def _patched_flags(change: Callable[[dict[Any, Any]], None]) -> Any:
    """Of the frontends that a service port is to have."""

    def frontends(port: ServicePort, has_any: bool) -> dict[Any, Any]:
        found = _frontends(port, has_any)
        change(found)
        return found

    return patch.object(desired_service, "_frontends", frontends)


_frontends = desired_service._frontends


def _without(word: str) -> Any:
    def change(found: dict[Any, Any]) -> None:
        found |= {at: flags - {word} for at, flags in found.items()}

    return _patched_flags(change)


def policies_are_ignored() -> Any:
    """Local counts as Cluster."""
    return _without("local")


def restrictions_are_ignored() -> Any:
    """Of load balancers and NodePorts."""
    return _without("restricted")


def endpoints_elsewhere_are_forgotten() -> Any:
    """Where none is on this node requests are refused."""
    return _without("endpoints")


def nodeports_are_not_served() -> Any:
    return patch.object(nodeport_addresses, "served_addresses", lambda *_: frozenset())


def only_one_family_is_listed() -> Any:
    """Of two cluster IPs the second is not served."""

    def cluster_ips(spec: Any, warnings: list[str]) -> Any:
        return dict(list(_cluster_ips(spec, warnings).items())[:1])

    return patch.object(services, "_cluster_ips", cluster_ips)


_cluster_ips = services._cluster_ips


def source_ranges_are_not_written() -> Any:
    return _in_order(lambda parts: [part for part in parts if part.name != "source_ranges"])


def weight_zero_counts() -> Any:
    """Endpoints of weight 0 get new connections."""

    def select(endpoints: Any, topology: Any) -> Any:
        weighted = [structs.replace(each, weight=each.weight or 1) for each in endpoints]
        return _select(tuple(weighted), topology)

    return patch.object(cluster_state, "select", select)


_select = cluster_state.select


def tables_name_the_wrong_slot() -> Any:
    """The one behind."""

    def places(*arguments: Any) -> list[tables.TablePlace]:
        return [each._replace(slot=each.slot + 1) for each in _places(*arguments)]

    return patch.object(tables, "places", places)


_places = tables.places


def every_backend_counts_as_here() -> Any:
    """Nothing is masqueraded."""
    both = {True: frozenset({"here"}), False: frozenset({"here"})}
    flags = {key: value | both[True] for key, value in desired_service._FLAGS.items()}
    order = {
        value: desired_service._ORDER[desired_service._FLAGS[key]] for key, value in flags.items()
    }
    return patch.multiple(desired_service, _FLAGS=flags, _ORDER=order)


def slots_name_the_lists_in_use_alone() -> Any:
    """While a policy changes, affinity finds backends that are not in the list that is asked."""

    def wanted(port: ServicePort, found: Selection, *more: Any) -> Any:
        used = found.cluster * uses_cluster(port), found.local * uses_local(port)
        return _wanted(port, replace(found, cluster=used[0], local=used[1]), *more)

    return patch.object(service_sync, "desired_service", wanted)


_wanted = desired_service.desired_service


def sweeps_take_open_flows() -> Any:
    return patch.object(Timeouts, "_nanoseconds", lambda self, protocol, found: 0)


def sweeps_leave_flows() -> Any:
    """One entry of each is forgotten."""

    def remove(self: FlowTable, entries: Any) -> Any:
        return _remove(self, dict(list(entries.items())[:-1]))

    return patch.object(FlowTable, "remove", remove)


_remove = FlowTable.remove


def forgotten_connections_stay_counted() -> Any:
    """Those whose flow a sweep has deleted."""
    return patch.object(EndedConnections, "sweep", lambda self: 0)


def open_sockets_count_as_ended() -> Any:
    """Only flows are looked through."""

    def remembered(self: EndedConnections, name: str) -> Any:
        return _remembered(self, name) if name in FLOW_MAPS else []

    return patch.object(EndedConnections, "_remembered", remembered)


_remembered = EndedConnections._remembered


def programs_first() -> Any:
    """Attached before the maps are filled."""
    return patch.object(ClusterState, "complete", property(lambda self: True))


MUTATIONS: list[Mutation] = [
    frontends_before_slots, deleted_before_created, names_of_removed_backends_stay,
    services_deleted_while_away_stay, a_failed_write_counts_as_written,
    removed_backends_keep_their_slot, removed_slices_are_ignored, hooks_are_not_put_back,
    links_are_not_held, nothing_marks_a_write, ranges_are_forgotten, policies_are_ignored,
    restrictions_are_ignored, endpoints_elsewhere_are_forgotten, nodeports_are_not_served,
    only_one_family_is_listed, source_ranges_are_not_written, weight_zero_counts,
    tables_name_the_wrong_slot, every_backend_counts_as_here,
    slots_name_the_lists_in_use_alone, sweeps_take_open_flows, sweeps_leave_flows,
    forgotten_connections_stay_counted, open_sockets_count_as_ended, programs_first,
]  # fmt: skip


def versions_are_kept_over_410() -> Any:
    """The next watch asks for what is gone."""
    return patch.object(Position, "restart", lambda self: None)


def lists_only_add() -> Any:
    """What is not in a list any more stays."""

    def replace(self: ClusterState, event: Replaced) -> Any:
        self.listed.add(event.kind)
        return [w for k, found in event.objects.items() for w in self._change(event.kind, k, found)]

    return patch.object(ClusterState, "_replace", replace)


def only_the_first_page_is_read() -> Any:
    return patch.object(ListMetadata, "token", "")


def watches_do_not_move_on() -> Any:
    """After a break they tell again what is past, and removed objects come back."""

    def emit(self: Position, event: Any, version: str) -> None:
        _emit(self, event, version if isinstance(event, Replaced) else "")

    return patch.object(Position, "emit", emit)


_emit = Position.emit


def a_silent_watch_is_left_alone() -> Any:
    """It is opened anew only where an error ends it."""
    return patch.object(api, "SILENCE", 1e9)


OF_THE_API: list[Mutation] = [
    versions_are_kept_over_410, lists_only_add, only_the_first_page_is_read,
    watches_do_not_move_on, a_silent_watch_is_left_alone,
]  # fmt: skip


@pytest.fixture(params=OF_THE_API, ids=lambda mutation: mutation.__name__)
def broken_source(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


@pytest.fixture(params=MUTATIONS, ids=lambda mutation: mutation.__name__)
def broken(request: pytest.FixtureRequest) -> Iterator[None]:
    with request.param():
        yield


def test_nothing_is_found_in_the_product_as_it_is(runner: Runner, api_runner: Runner) -> None:
    """Otherwise the tests below would say nothing."""
    assert runner.run(changing_policies()).error is None
    assert [runner.run(draw(seed)).error for seed in range(10)] == [None] * 10
    assert [api_runner.run(draw_api(seed)).error for seed in range(10)] == [None] * 10


def test_is_found(runner: Runner, broken: None) -> None:
    """By one of the first schedules, or by one that was made for a mistake that is seldom met."""
    schedules = chain([changing_policies()], map(draw, range(MOST)))
    assert any(runner.run(steps).error for steps in schedules)


def test_is_found_behind_an_api_server(api_runner: Runner, broken_source: None) -> None:
    """Of the source, and of what is done with its lists."""
    assert any(api_runner.run(draw_api(seed)).error for seed in range(MOST))
