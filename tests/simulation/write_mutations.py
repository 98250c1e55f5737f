# SPDX-License-Identifier: Apache-2.0
"""Deliberate bugs in the agent's knowledge, plans and writes; each is a patch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from msgspec import structs

from ebpflb.agent import service_sync
from ebpflb.agent.audit import HooksCheck
from ebpflb.agent.engine import NetfilterSync
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.kernel import map_writer
from ebpflb.kernel.attach.cgroup_links import HeldLinks
from ebpflb.kernel.map_writer import MapWriter
from ebpflb.kernel.maps.service_places import ServicePlaces
from ebpflb.model import devices, endpoints, services
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.endpoints import Selection, uses_cluster, uses_local
from ebpflb.model.events import Key, Kind
from ebpflb.model.services import ServicePort
from ebpflb.plan import desired, tables
from ebpflb.plan.planner import Plan, Planner
from ebpflb.plan.service_entries import ServiceEntries

Mutation = Callable[[], Any]


_Parts = list[tuple[str, Any]]


def _in_order(order: Callable[[_Parts], _Parts]) -> Any:
    return patch.object(Plan, "parts", lambda plan: order(list(_parts(plan))))


_parts = Plan.parts


def frontends_before_slots() -> Any:
    """The order of writes is swapped."""
    return _in_order(lambda parts: sorted(parts, key=lambda part: part[0] != "services"))


def deleted_before_created() -> Any:
    """A frontend is removed, and then written again with its new service."""

    def apply(self: MapWriter, plan: Plan) -> None:
        self.maps["services"].delete([frontend for frontend, _ in plan.services])
        _apply(self, plan)

    return patch.object(MapWriter, "apply", apply)


_apply = MapWriter.apply


def names_of_removed_backends_stay() -> Any:
    """A kind of entry is never removed."""
    return _in_order(lambda parts: [p for p in parts if p[0] != "removed_backend_names"])


def copies_of_removed_frontends_stay() -> Any:
    """Programs go on to find a frontend that was removed."""
    return patch.object(ServicePlaces, "remove", lambda self, frontends: None)


def services_deleted_while_away_stay() -> Any:
    """A new agent does not remove services that it does not know."""
    plan = Planner.plan_changes
    return patch.object(Planner, "plan_everything", lambda it, new, now, but: plan(it, new, now))


def a_failed_write_counts_as_written() -> Any:
    """The maps are not read again after a failure."""

    def write(self: ServiceSync) -> None:
        self.must_start_over = False
        _write(self)

    return patch.object(ServiceSync, "write", write)


_write = ServiceSync.write


def removed_backends_keep_their_slot() -> Any:
    """Affinity and sockets would keep finding removed backends."""
    return patch.object(Planner, "_free_backend_id", lambda self, id: None)


def removed_slices_are_ignored() -> Any:
    remove = ClusterState._remove

    def ignoring(cluster: ClusterState, kind: Kind, key: Key) -> None:
        if kind is not Kind.ENDPOINT_SLICE:
            remove(cluster, kind, key)

    return patch.object(ClusterState, "_remove", ignoring)


def hooks_are_not_put_back() -> Any:
    return patch.object(HooksCheck, "repair", lambda self: None)


def links_are_not_held() -> Any:
    """A removed pin detaches its program."""
    return patch.object(HeldLinks, "hold", lambda self, pins: None)


def nothing_marks_a_write() -> Any:
    """The count of writes stays odd after an agent died during a write."""
    return patch.object(map_writer, "_ended", lambda settings, frontends_move: {})


def ranges_are_forgotten() -> Any:
    """A new agent narrows the span of cluster IPs until it has the list."""
    return patch.object(MapWriter, "service_ranges", lambda self: [])


def _patched_flags(change: Callable[[dict[Any, Any]], None]) -> Any:
    """Change the flags of the frontends that a service port is to have."""

    def frontends(port: ServicePort, has_any: bool, **further: bool) -> dict[Any, Any]:
        found = _frontends(port, has_any, **further)
        change(found)
        return found

    return patch.object(desired, "_frontends", frontends)


_frontends = desired._frontends


def _without(word: str) -> Any:
    def change(found: dict[Any, Any]) -> None:
        found |= {at: flags - {word} for at, flags in found.items()}

    return _patched_flags(change)


def policies_are_ignored() -> Any:
    """Local counts as Cluster."""
    return _without("local")


def restrictions_are_ignored() -> Any:
    """Restrictions of load balancers and NodePorts are ignored."""
    return _without("restricted")


def endpoints_elsewhere_are_forgotten() -> Any:
    """Requests are refused if no endpoint is on this node."""
    return _without("endpoints")


def nodeports_are_not_served() -> Any:
    return patch.object(devices, "served_addresses", lambda *_: frozenset())


def only_one_family_is_listed() -> Any:
    """The second of two cluster IPs is not served."""

    def cluster_ips(spec: Any, warnings: list[str]) -> Any:
        return dict(list(_cluster_ips(spec, warnings).items())[:1])

    return patch.object(services, "_cluster_ips", cluster_ips)


_cluster_ips = services._cluster_ips


def source_ranges_are_not_written() -> Any:
    return _in_order(lambda parts: [part for part in parts if part[0] != "source_ranges"])


def weight_zero_counts() -> Any:
    """Endpoints of weight 0 get new connections."""

    def select(endpoints: Any, topology: Any) -> Any:
        weighted = [structs.replace(each, weight=each.weight or 1) for each in endpoints]
        return _select(tuple(weighted), topology)

    return patch.object(endpoints, "select", select)


_select = endpoints.select


def tables_name_the_wrong_slot() -> Any:
    """A place of a table names the next slot."""
    return patch.object(tables, "in_block", lambda places, first: _in_block(places, first + 1))


_in_block = tables.in_block


def every_backend_counts_as_here() -> Any:
    """Nothing is masqueraded."""
    both = {True: frozenset({"here"}), False: frozenset({"here"})}
    flags = {key: value | both[True] for key, value in desired._FLAGS.items()}
    order = {value: desired._ORDER[desired._FLAGS[key]] for key, value in flags.items()}
    return patch.multiple(desired, _FLAGS=flags, _ORDER=order)


def slots_name_the_lists_in_use_alone() -> Any:
    """While a policy changes, affinity finds backends outside the requested list."""

    def wanted(port: ServicePort, found: Selection, *more: Any) -> Any:
        used = found.cluster * uses_cluster(port), found.local * uses_local(port)
        return _wanted(port, replace(found, cluster=used[0], local=used[1]), *more)

    return patch.object(service_sync, "desiring", wanted)


_wanted = desired.desiring


def programs_first() -> Any:
    """Programs are attached before the maps are filled."""
    return patch.object(ClusterState, "complete", property(lambda self: True))


def translations_are_written_last() -> Any:
    """Programs choose backends that netfilter does not know yet."""

    def apply(self: MapWriter, plan: Plan) -> None:
        with patch.object(self, "netfilter", None):
            _apply(self, plan)
        if self.netfilter:
            self.netfilter.write(plan)

    return patch.object(MapWriter, "apply", apply)


def translations_end_at_once() -> Any:
    """A program has chosen a backend that netfilter no longer translates."""

    def free_block(self: Planner, old: ServiceEntries, used_ids: frozenset[int]) -> None:
        self.plan.removed_translations += old.translations(but=used_ids)
        _free_block(self, old, used_ids)

    return patch.object(Planner, "_free_block", free_block)


_free_block = Planner._free_block


def translations_are_not_made_at_the_start() -> Any:
    """Netfilter keeps an earlier agent's elements, or has none."""
    return patch.object(NetfilterSync, "_fill", lambda self: None)


def slots_of_removed_backends_go_first() -> Any:
    """A crash leaves services with a backend that the next agent takes from netfilter."""
    return _in_order(lambda parts: sorted(parts, key=lambda p: p[0] != "removed_backend_slots"))


OF_WRITES: list[Mutation] = [
    frontends_before_slots, deleted_before_created, names_of_removed_backends_stay,
    copies_of_removed_frontends_stay, services_deleted_while_away_stay,
    a_failed_write_counts_as_written, removed_backends_keep_their_slot,
    removed_slices_are_ignored, hooks_are_not_put_back,
    links_are_not_held, nothing_marks_a_write, ranges_are_forgotten, policies_are_ignored,
    restrictions_are_ignored, endpoints_elsewhere_are_forgotten, nodeports_are_not_served,
    only_one_family_is_listed, source_ranges_are_not_written, weight_zero_counts,
    tables_name_the_wrong_slot, every_backend_counts_as_here, slots_name_the_lists_in_use_alone,
    programs_first, translations_are_written_last, translations_end_at_once,
    translations_are_not_made_at_the_start, slots_of_removed_backends_go_first,
]  # fmt: skip
