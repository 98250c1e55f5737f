# SPDX-License-Identifier: Apache-2.0
"""The entries that a plan writes, and the entries that it leaves unchanged (planner.py)."""

from ebpflb.entries.services import Translation
from ebpflb.plan.desired import DesiredService
from ebpflb.plan.map_contents import MapContents
from ebpflb.plan.planner import Planner
from tests.plan.builders import CAPACITY, backend, by_name, desired, frontend, name
from tests.plan.node import PlannedNode

WEB = desired("web", [1, 2], [1, 2])


def node_with(*ports: DesiredService) -> PlannedNode:
    """Return a node that serves these service ports, with nothing in quarantine."""
    node = PlannedNode()
    node.change(by_name(*ports))
    node.wait(2)
    return node


def ids(node: PlannedNode, service: str) -> dict[int, int]:
    """Return the id of each of a service's backends, by the backend's number."""
    programmed = node.planner.actual[name(service)]
    return {int(b.address) & 0xFF: b.id for _, b in programmed.slots()}


def test_only_what_changed() -> None:
    """A change of one service does not write the other service."""
    node = node_with(WEB, desired("db", [3], [3]))
    plan = node.change(by_name(desired("db", [3], [4])))
    assert {service for service, _ in plan.services} == {frontend(3)}
    assert {b.service for _, b in plan.slots} == {node.planner.actual[name("db")].id}


def test_netfilter_gets_and_loses_endpoints() -> None:
    """Netfilter gets a new backend's endpoint with its plan, and loses a removed endpoint when its
    id is free; a plan that reuses the id brings the new endpoint.
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


def test_programs_of_another_layout_find_what_they_choose() -> None:
    """Programs of another layout find the endpoints that they choose.

    In empty maps a backend gets the id that led to its endpoint before, and no other backend gets
    that id. The ids of removed endpoints end when these programs are replaced.
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
    assert gone.id not in node.planner.backend_ids
