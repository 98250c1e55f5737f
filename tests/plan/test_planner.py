# SPDX-License-Identifier: Apache-2.0
"""The entries that a plan writes, and those that it leaves alone (planner.py)."""

from dataclasses import fields

import pytest
from msgspec import structs

from ebpflb.entries.flows import Unanswered
from ebpflb.entries.services import BackendName, Range, Translation
from ebpflb.model.services import Protocol
from ebpflb.plan.desired import DesiredService
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.planner import Plan, Planner
from ebpflb.plan.service_entries import BackendChange
from tests.plan.builders import CAPACITY, LOCAL, SERVING, backend, by_name, desired, frontend, name
from tests.plan.node import PlannedNode, check_tidy, not_programmed

WEB = desired("web", [1, 2], [1, 2])


def written(plan: Plan) -> set[str]:
    """The parts of a plan that are not empty."""
    return {part.name for part in fields(plan) if getattr(plan, part.name)}


def node_with(*ports: DesiredService) -> PlannedNode:
    """A node that serves these, with nothing in quarantine."""
    node = PlannedNode()
    node.change(by_name(*ports))
    node.wait(2)
    return node


def blocks(node: PlannedNode) -> set[Range]:
    return {service.block for service in node.maps.services.values()}


def ids(node: PlannedNode, service: str) -> dict[int, int]:
    """The id of each of a service's backends, by the backend's number."""
    programmed = node.planner.actual[name(service)]
    return {int(b.address) & 0xFF: b.id for _, b in programmed.slots()}


def test_new_service() -> None:
    """All that a service names, the names for people, and its frontends."""
    plan = PlannedNode().change(by_name(WEB))
    names = {"service_names", "backend_names"}
    blocks = {"translations", "slots", "backend_slots"}
    assert written(plan) == {"last_ids", *blocks, *names, "cluster_ips", "services"}
    assert [slot for slot, _ in plan.slots] == [0, 1]
    assert plan.backend_slots == [(1, 0), (2, 1)]
    assert plan.service_names == [(1, name("web"))]
    assert [service.block for _, service in plan.services] == [Range(0, 2)] * 2


def test_lists_are_ranges() -> None:
    """The cluster list and the local list are runs of the block, flags go with the frontend."""
    of = [backend(1), backend(2, LOCAL), backend(3, LOCAL), backend(4, SERVING)]
    web = desired("web", {frontend(1): frozenset({"external"})}, of, affinity_seconds=60)
    (service,) = node_with(web).maps.services.values()
    assert (service.cluster, service.local) == (Range(0, 1), Range(1, 2))
    assert (service.slots, service.affinity_seconds) == (4, 60)
    assert service.flags == {"external"}


def test_unchanged_service() -> None:
    """For an unchanged service nothing is written."""
    assert not node_with(WEB).change(by_name(WEB))


def test_only_what_changed() -> None:
    """Another service is not touched."""
    node = node_with(WEB, desired("db", [3], [3]))
    plan = node.change(by_name(desired("db", [3], [4])))
    assert {service for service, _ in plan.services} == {frontend(3)}
    assert {b.service for _, b in plan.slots} == {node.planner.actual[name("db")].id}


@pytest.mark.parametrize(
    "changed",
    [
        desired("web", [1, 2], [1, 2], affinity_seconds=60),
        desired("web", [1, 2], [1, 2], flags=frozenset({"local", "endpoints"})),
    ],
)
def test_policy_change(changed: DesiredService) -> None:
    """Another policy for the same backends writes the frontends and no slot."""
    node = node_with(WEB)
    assert written(node.change(by_name(changed))) == {"services"}
    assert blocks(node) == {Range(0, 2)}


def test_new_frontend() -> None:
    """A further frontend leads to the block that is there."""
    node = node_with(WEB)
    plan = node.change(by_name(desired("web", [1, 2, 3], [1, 2])))
    assert written(plan) == {"services", "cluster_ips"}
    assert [f for f, _ in plan.services] == [frontend(3)]


def test_endpoint_change() -> None:
    """Other backends get a block of their own; the old one is not written."""
    node = node_with(WEB)
    plan = node.change(by_name(desired("web", [1, 2], [2, 3])))
    assert [slot for slot, _ in plan.slots] == [2, 3]
    assert blocks(node) == {Range(2, 2)}


def test_backend_changes_lists() -> None:
    """A backend's flags are in its slot, so that another list means another block."""
    node = node_with(WEB)
    node.change(by_name(desired("web", [1, 2], [1, backend(2, LOCAL)])))
    assert blocks(node) == {Range(2, 2)}
    assert ids(node, "web") == {1: 1, 2: 2}


def test_changes_of_backends_and_frontends_are_reported() -> None:
    """Removed backends and moved frontends are reported: both may leave flows behind."""
    node = node_with(WEB)
    take = node.planner.take_backend_changes
    name = WEB.name
    assert take() == [BackendChange(name, frozenset())]
    node.change(by_name(desired("web", [1], [1, 2])))
    assert take() == [BackendChange(name, frozenset())], "a frontend is gone"
    node.change(by_name(desired("web", [1, 2], [1, 2])))
    assert take() == [BackendChange(name, frozenset())], "and there again"
    node.change(by_name(desired("web", [1, 2], [2])))
    assert take() == [
        BackendChange(
            name,
            frozenset({1}),
            unanswered=frozenset({Unanswered(Protocol.TCP, backend(1).endpoint)}),
        )
    ]
    node.change(by_name(desired("web", [1, 2], [2])))
    assert take() == []


def test_backend_gets_another_name() -> None:
    """A pod's name says nothing to the datapath: the name alone is written."""
    node = node_with(WEB)
    renamed = structs.replace(backend(2), name=BackendName("node-b", "pod-x"))
    plan = node.change(by_name(desired("web", [1, 2], [1, renamed])))
    assert written(plan) == {"backend_names"}
    assert node.maps.backend_names[2] == BackendName("node-b", "pod-x")


def test_resting_range_is_not_written() -> None:
    """A freed block is used again after its rest and not before."""
    node = node_with(WEB)
    for endpoints, base in (([3], 2), ([4], 3), ([5], 4)):
        node.wait(0.25)
        node.change(by_name(desired("web", [1], endpoints)))
        assert blocks(node) == {Range(base, 1)}
    node.wait(0.5)
    node.change(by_name(desired("web", [1], [6])))
    assert blocks(node) == {Range(0, 1)}


def test_ids_are_kept() -> None:
    """A service keeps its id and its backends theirs; a newcomer gets a fresh one."""
    node = node_with(WEB)
    plan = node.change(by_name(desired("web", [1, 2], [2, 3])))
    assert ids(node, "web") == {2: 2, 3: 3}
    assert node.planner.actual[name("web")].id == 1
    assert plan.backend_names == [(3, BackendName("node-a", "pod-3"))]
    assert plan.removed_backend_names == [1]


def test_former_backend_is_nowhere() -> None:
    """Affinity and datagram flows do not find a former backend in its old slot."""
    node = node_with(WEB)
    plan = node.change(by_name(desired("web", [1, 2], [2])))
    assert (plan.backend_slots, plan.removed_backend_slots) == ([(2, 2)], [1])
    assert node.maps.slots[0].id == 1 and node.maps.find(1, 1) is None


def test_same_backend_of_two_services() -> None:
    """Each service has an id of its own for an endpoint that both use."""
    node = node_with(WEB, desired("db", [3], [1, 2]))
    assert not set(ids(node, "web").values()) & set(ids(node, "db").values())


def test_translations() -> None:
    """Netfilter gets a newcomer's endpoint with the plan that brings it, and loses a former
    backend's when its id may be used again; the plan that uses it again brings the new endpoint.
    """
    node = PlannedNode(CAPACITY._replace(backend_ids=4))
    node.change(by_name(WEB))
    first, second, third, fourth = (
        Translation(id, backend(id).address, 8080) for id in (1, 2, 3, 4)
    )
    plan = node.change(by_name(desired("web", [1, 2], [2, 3])))
    assert (plan.translations, plan.removed_translations) == ([third], [])
    assert node.maps.translations == {1: first, 2: second, 3: third}
    node.wait(2)
    plan = node.change(by_name(desired("web", [1, 2], [2, 3, 4])))
    again = fourth._replace(id=1)
    assert (plan.translations, plan.removed_translations) == ([again], [first])
    assert node.maps.translations == {1: again, 2: second, 3: third}


def test_translations_of_other_changes() -> None:
    """A block that is written elsewhere, with the same backends, needs none."""
    node = node_with(WEB)
    plan = node.change(by_name(desired("web", [1, 2], [1, backend(2, LOCAL)])))
    assert plan.slots
    assert not plan.translations
    node.wait_for_quarantine()
    assert node.maps.translations.keys() == {1, 2}


def test_removed_frontend() -> None:
    """A frontend that is not desired goes, and the service stays."""
    plan = node_with(WEB).change(by_name(desired("web", [1], [1, 2])))
    assert written(plan) == {"removed_services", "removed_cluster_ips"}
    assert plan.removed_services == [frontend(2)]


def test_removed_service() -> None:
    """Frontends, names and backend_slots go; the slots stay as they are for late readers."""
    node = node_with(WEB)
    plan = node.change({name("web"): None})
    assert plan.removed_services == [frontend(1), frontend(2)]
    assert (plan.removed_service_names, plan.removed_backend_names) == ([1], [1, 2])
    assert not plan.slots and len(node.maps.slots) == 2
    check_tidy(node)


def test_order_of_a_plan() -> None:
    """First what is referred to, then the frontends, then what nothing refers to any more."""
    assert [part.name for part in fields(Plan)] == [
        "last_ids", "translations",
        "slots", "backend_slots", "tables", "choices",
        "service_names", "backend_names", "source_ranges",
        "services", "cluster_ips",
        "removed_cluster_ips", "removed_services", "removed_source_ranges",
        "removed_service_names", "removed_backend_slots", "removed_backend_names",
        "removed_translations",
    ]  # fmt: skip


@pytest.mark.parametrize(("giver", "taker"), [("a", "b"), ("b", "a")])
def test_frontend_moves(giver: str, taker: str) -> None:
    """A frontend that another service takes over is written once and never missing."""
    node = node_with(desired(giver, [1, 2], [1]), desired(taker, [3], [2]))
    plan = node.change(by_name(desired(giver, [1], [1]), desired(taker, [2, 3], [2])))
    assert [f for f, _ in plan.services] == [frontend(2)]
    assert plan.removed_services == []
    assert node.maps.services[frontend(2)].id == node.planner.actual[name(taker)].id
    check_tidy(node)


@pytest.mark.parametrize(("giver", "taker"), [("a", "b"), ("b", "a")])
def test_frontend_outlives_its_service(giver: str, taker: str) -> None:
    """A frontend whose service goes passes on to the next claimant in one write."""
    node = node_with(desired(giver, [1], [1]))
    plan = node.change({name(giver): None, **by_name(desired(taker, [1], [2]))})
    assert plan.removed_services == []
    assert node.maps.services[frontend(1)].id == node.planner.actual[name(taker)].id
    check_tidy(node)


def test_service_without_a_frontend_of_its_own() -> None:
    """A service that lost all its frontends to older ones takes no room."""
    node = node_with(desired("a", [1], [1], created="2025"))
    node.change(by_name(desired("b", [1], [2], created="2024")))
    assert node.planner.actual.keys() == {name("b")}
    check_tidy(node)


def test_complete() -> None:
    """After a restart, what is not desired any more is removed; the rest stays untouched."""
    node = node_with(WEB, desired("db", [3], [3]))
    del node.desired[name("db")]
    plan = node.restart()
    gone = {
        "removed_services",
        "removed_cluster_ips",
        "removed_service_names",
        "removed_backend_slots",
        "removed_backend_names",
    }
    assert written(plan) == gone
    assert plan.removed_services == [frontend(3)]


def test_plan_in_a_log() -> None:
    """A plan says briefly what it is about."""
    plan = node_with(WEB).change(by_name(desired("web", [1], [2, 3])))
    assert repr(plan) == "<Plan frontends ~1 -1, slots ~2, backends -1>"


def test_unwanted_is_not_tried_again() -> None:
    """A service that never got a place is forgotten once it is not desired."""
    planner = Planner(CAPACITY._replace(slots=1))
    planner.plan_changes(by_name(WEB), 0)
    assert not_programmed(planner).keys() == {name("web")}
    assert not planner.plan_changes({name("web"): None}, 0)
    assert not_programmed(planner) == {}


def test_programs_of_another_layout_find_what_they_choose() -> None:
    """Programs of another layout find the endpoints that they choose.

    In empty maps a backend gets the id that led to its endpoint before, and no other backend gets
    such an id. The ids of removed endpoints end when these programs are replaced.
    """
    kept, gone = (
        Translation(id, b.address, b.port) for id, b in ((2, backend(1)), (1, backend(9)))
    )
    node = PlannedNode()
    node.maps.translations = {it.id: it for it in (kept, gone)}
    node.planner = Planner(CAPACITY, MapContents(former_translations=[kept, gone]))
    plan = node.change(by_name(WEB))
    assert ids(node, "web") == {1: kept.id, 2: 3}
    assert [it.id for it in plan.translations] == [3], "the other one is in force already"
    node.wait(2)
    node.change(by_name(desired("web", [1, 2], [2])))
    node.wait(2)
    assert node.change(by_name(WEB)).removed_translations == [kept]
    node.planner.programs_replaced()
    node.change(by_name(desired("other", [3], [3])))
    node.wait(2)
    assert node.change({}).removed_translations == [gone]
    assert gone.id not in node.planner.backend_ids.used
