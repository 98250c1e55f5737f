# SPDX-License-Identifier: Apache-2.0
"""Which connections are stale after each change of a service port, and because of on-removal."""

import math
from collections.abc import Iterable
from dataclasses import replace
from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from msgspec import structs

from ebpflb.entries.services import Frontend
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.desired import DesiredBackend, DesiredService
from ebpflb.plan.planner import Planner
from ebpflb.plan.stale import (
    CHANGING,
    DELETED,
    Endpoint,
    Endpoints,
    Ends,
    Removal,
    Resets,
    Stale,
    Watched,
    united,
)
from tests.load import scaled
from tests.plan import histories
from tests.plan.builders import BOTH, CAPACITY, SERVING, backend, desired, frontend
from tests.plan.histories import Step
from tests.plan.node import PlannedNode

PROTOCOLS = pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP, Protocol.SCTP])
READY, LEAVING = frozenset({"cluster"}), frozenset[str]()


def port(
    *backends: DesiredBackend,
    protocol: Protocol = Protocol.UDP,
    numbers: Iterable[int] = (1,),
    name: str = "dns",
) -> DesiredService:
    """Return a service port with these backends and frontends."""
    frontends = {frontend(n)._replace(protocol=protocol): frozenset[str]() for n in numbers}
    made = replace(desired(name, frontends, ()), backends=backends)
    return replace(made, name=made.name._replace(protocol=protocol))


class Planned:
    """A planner, and the stale connections after its last change."""

    def __init__(self, *ports: DesiredService) -> None:
        self.planner = Planner(CAPACITY)
        self.change(*ports)

    def change(self, *ports: DesiredService, without: Iterable[PortName] = ()) -> list[Removal]:
        wanted = dict.fromkeys(without) | {each.name: each for each in ports}
        self.planner.plan_changes(wanted, 0.0)
        self.planner.written(0.0)
        self.removals = self.planner.take_removals()
        return self.removals

    def serving(self, at: Frontend) -> Endpoints | None:
        owner = self.planner.frontends.owners.get(at)
        actual = self.planner.actual.get(owner) if owner else None
        return {each.endpoint: each.flags for each in actual.backends} if actual else None

    def ends(self, at: Frontend, endpoint: Endpoint, **more: bool) -> Ends:
        stale = Stale(self.serving, lambda key: (key,), self.removals)
        return stale.ends(at, endpoint, **more)


def at(number: int, protocol: Protocol = Protocol.UDP) -> Frontend:
    return frontend(number)._replace(protocol=protocol)


ONE, TWO, THREE = backend(1), backend(2), backend(3)
ASIDE = structs.replace(backend(1, SERVING), is_set_aside=True)


def all_of(protocol: Protocol) -> Ends:
    """Return all connections that end because no new connection would lead there."""
    return Ends.ALL if protocol is Protocol.UDP else Ends.UNANSWERED


@PROTOCOLS
@pytest.mark.parametrize("left", [(TWO, THREE), ()], ids=["others serve", "none serves"])
def test_an_endpoint_that_is_removed(protocol: Protocol, left: tuple[DesiredBackend, ...]) -> None:
    """UDP flows to the removed endpoint end, and so do unanswered connections; connections to other
    endpoints stay.
    """
    planned = Planned(port(ONE, TWO, protocol=protocol))
    (removal,) = planned.change(port(*left, protocol=protocol))
    gone = {ONE.endpoint} | ({TWO.endpoint} if not left else set())
    assert (removal.endpoints, removal.has_left) == (gone, True)
    assert planned.ends(at(1, protocol), ONE.endpoint) is all_of(protocol)
    kept = planned.ends(at(1, protocol), TWO.endpoint)
    assert kept is (Ends.NONE if left else all_of(protocol))
    assert not planned.change(port(*left, protocol=protocol))


@PROTOCOLS
def test_a_service_port_that_is_deleted(protocol: Protocol) -> None:
    """Only connections to its former endpoints end: another program may now have the frontend's
    address.
    """
    planned = Planned(port(ONE, protocol=protocol))
    planned.change(without=[port(protocol=protocol).name])
    assert planned.ends(at(1, protocol), ONE.endpoint) is all_of(protocol)
    assert planned.ends(at(1, protocol), TWO.endpoint) is Ends.NONE
    assert planned.ends(at(2, protocol), ONE.endpoint) is Ends.NONE


@PROTOCOLS
def test_a_frontend_that_is_lost(protocol: Protocol) -> None:
    planned = Planned(port(ONE, protocol=protocol, numbers=(1, 2)))
    (removal,) = planned.change(port(ONE, protocol=protocol))
    assert not removal.has_left
    assert planned.ends(at(2, protocol), ONE.endpoint) is all_of(protocol)
    assert planned.ends(at(1, protocol), ONE.endpoint) is Ends.NONE


@PROTOCOLS
def test_an_endpoint_that_is_set_aside(protocol: Protocol) -> None:
    """Unanswered connections to the endpoint start again; all others continue."""
    planned = Planned(port(ONE, TWO, protocol=protocol))
    planned.change(port(TWO, ASIDE, protocol=protocol))
    assert planned.ends(at(1, protocol), ONE.endpoint) is Ends.UNANSWERED
    assert planned.ends(at(1, protocol), TWO.endpoint) is Ends.NONE
    assert not planned.change(port(ONE, TWO, protocol=protocol))


@PROTOCOLS
def test_a_port_that_is_renamed(protocol: Protocol) -> None:
    """Connections of the renamed port continue, even unanswered ones: the endpoint still serves
    them.
    """
    planned = Planned(port(ONE, TWO, protocol=protocol))
    renamed = port(ONE, TWO, protocol=protocol, name="renamed")
    removals = planned.change(renamed, without=[port(protocol=protocol).name])
    assert {each for it in removals for each in it.endpoints} == {ONE.endpoint, TWO.endpoint}
    for is_socket in (False, True):
        assert planned.ends(at(1, protocol), ONE.endpoint, is_socket=is_socket) is Ends.NONE


@PROTOCOLS
def test_an_endpoint_that_terminates(protocol: Protocol) -> None:
    """A terminating endpoint keeps all its connections."""
    planned = Planned(port(ONE, TWO, protocol=protocol))
    assert not planned.change(port(TWO, backend(1, SERVING), protocol=protocol))
    assert planned.ends(at(1, protocol), ONE.endpoint) is Ends.NONE


def test_a_target_port_that_changes() -> None:
    planned = Planned(port(ONE))
    moved = structs.replace(ONE, port=9090)
    planned.change(port(moved))
    assert planned.ends(at(1), ONE.endpoint) is Ends.ALL
    assert planned.ends(at(1), moved.endpoint) is Ends.NONE


def test_what_is_searched_for() -> None:
    """If a UDP port gets its first endpoint, or a frontend, untranslated flows are stale.

    Added endpoints, and TCP, need no search.
    """
    planned = Planned(port())
    itself = at(1).address, at(1).port
    assert planned.ends(at(1), itself) is Ends.NONE, "none serves: it is no state to anybody"
    assert planned.change(port(ONE))
    assert planned.ends(at(1), itself) is Ends.ALL
    assert not planned.change(port(ONE, TWO))
    assert planned.change(port(ONE, TWO, numbers=(1, 2)))
    of_tcp = Planned(port(protocol=Protocol.TCP))
    assert not of_tcp.change(port(ONE, protocol=Protocol.TCP))


def test_removals_of_writes_that_fail_do_not_add_up() -> None:
    """What is lost of the same frontends is one removal; frontends without endpoints stay apart."""
    places = [backend(number).endpoint for number in range(3)]
    frontends = [frontend(1)], [frontend(2)]
    lost = [Removal(Protocol.UDP, frontends[0], [place], [id]) for id, place in enumerate(places)]
    others = Removal(Protocol.UDP, frontends[0]), Removal(Protocol.UDP, frontends[1], places[:1])
    first, *rest = united([*lost, *others, *lost])
    assert (set(first.endpoints), set(first.ids)) == (set(places), {0, 1, 2})
    assert [(it.frontends, len(it.endpoints)) for it in rest] == [
        (frontends[0], 0),
        (frontends[1], 1),
    ]


def test_where_the_first_local_endpoint_comes() -> None:
    """With the first local endpoint (policy Local) flows are searched for, because packets went on
    to the router, or were dropped, before.
    """
    planned = Planned(port(ONE))
    assert planned.change(port(ONE, backend(2, BOTH)))


@pytest.mark.parametrize(
    ("serving", "is_socket", "ends"),
    [
        (None, False, Ends.NONE),
        (None, True, Ends.ALL),
        (CHANGING, True, Ends.NONE),
        ({}, False, Ends.ALL),
        ({ONE.endpoint: LEAVING}, True, Ends.NONE),
    ],
    ids=["nobody's frontend", "its hook knows", "it changes", "no endpoint", "it terminates"],
)
def test_by_the_maps_alone(serving: Endpoints | None, is_socket: bool, ends: Ends) -> None:
    """At the start of an agent, UDP flows are judged stale from the maps only."""
    stale = Stale(lambda _: serving, lambda key: (key,), ())
    assert stale.ends(at(1), ONE.endpoint, is_socket=is_socket) is ends


def test_sockets_of_tcp_are_not_ended_long_after() -> None:
    """A TCP socket whose endpoint was removed earlier is left alone: it is open by now, or expects
    no answer.
    """
    stale = Stale(lambda _: {}, lambda key: (key,), ())
    assert stale.ends(at(1, Protocol.TCP), ONE.endpoint, is_socket=True) is Ends.NONE


def test_a_nodeport() -> None:
    """A removed NodePort frontend has no address, but its connections have one."""
    nodeport, node = Frontend(ip_address(0), 30053, 17), ip_address("192.0.2.1")
    removal = Removal(Protocol.UDP, {nodeport}, {ONE.endpoint})
    there = nodeport._replace(address=node)
    stale = Stale(lambda _: None, lambda _: (there, nodeport), [removal])
    assert stale.ends(there, ONE.endpoint) is Ends.ALL
    assert stale.ports == {30053}


@given(histories.steps)
@settings(max_examples=scaled(60), deadline=None)
def test_removals_name_all_that_ends(steps: list[Step]) -> None:
    """Each pair of frontend and endpoint that stops serving is named, whatever changes."""
    node = PlannedNode()
    for step in steps:
        node.wait(step.seconds)
        before = pairs(node)
        node.change(histories.changes(node, step.edits))
        now = pairs(node)
        removed = {
            (frontend, endpoint)
            for each in node.planner.take_removals()
            for frontend in each.frontends
            for endpoint in each.endpoints
        }
        assert before - now <= removed


def pairs(node: PlannedNode) -> set[tuple[Frontend, Endpoint]]:
    return {
        (frontend, backend.endpoint)
        for entries in node.planner.actual.values()
        for frontend in entries.services
        for backend in entries.backends
    }


# on-removal: reset

NAME = PortName("default", "web", "tcp", Protocol.TCP, Family.IPV4)
WEB, GRACE = at(1, Protocol.TCP), 10.0


def watched(*endpoints: DesiredBackend, grace: float = GRACE) -> Watched:
    return Watched(grace, frozenset({WEB}), frozenset(each.endpoint for each in endpoints))


class Searches:
    """A record of resets, with connections to these endpoints; a search is made when it is due."""

    def __init__(self, *connected: DesiredBackend) -> None:
        self.resets, self.connected = Resets(), {each.endpoint for each in connected}

    def search(self, now: float) -> set[Endpoint]:
        """Return the endpoints whose connections are reset."""
        stale = Stale(lambda _: {}, lambda key: (key,), (), self.resets, now)
        found = {each for each in self.connected if stale.ends(WEB, each) is Ends.ALL}
        self.resets.searched(now)
        return found


def test_the_grace_begins_when_the_endpoint_is_missed() -> None:
    """The grace period ends once; after that only a removal makes another search due."""
    searches = Searches(ONE, TWO)
    assert searches.resets.update(NAME, watched(ONE, TWO), 0.0), "after a start it may be gone"
    assert searches.search(0.0) == set()
    assert not searches.resets.update(NAME, watched(ONE, TWO, THREE), 1.0)
    assert searches.resets.update(NAME, watched(TWO), 5.0)
    assert searches.search(5.0) == set()
    assert searches.resets.due == 15.0
    assert searches.search(14.9) == set()
    assert searches.search(15.0) == {ONE.endpoint}
    assert searches.resets.due == math.inf
    assert searches.search(16.0) == {ONE.endpoint}, "one that could not be ended before"


def test_an_endpoint_that_comes_back_keeps_its_connections() -> None:
    """After another removal the whole grace applies again."""
    searches = Searches(ONE)
    for now, listed in ((0.0, [ONE]), (1.0, []), (5.0, [ONE]), (9.0, [])):
        searches.resets.update(NAME, watched(*listed), now)
        assert not searches.search(now)
    assert searches.resets.due == 19.0
    assert searches.search(19.0) == {ONE.endpoint}


def test_a_deleted_service_keeps_its_grace() -> None:
    """Only connections to endpoints that the Service had, or was losing, are reset."""
    searches = Searches(ONE, TWO, THREE)
    searches.resets.update(NAME, watched(ONE, TWO), 0.0)
    searches.connected.remove(THREE.endpoint)
    searches.search(0.0)
    searches.resets.update(NAME, watched(TWO), 1.0)
    searches.search(1.0)
    assert searches.resets.update(NAME, DELETED, 2.0)
    searches.connected.add(THREE.endpoint)
    assert searches.search(2.0) == set()
    assert searches.search(11.0) == {ONE.endpoint}
    assert searches.search(12.0) == {ONE.endpoint, TWO.endpoint}
    searches.connected.clear()
    searches.search(13.0)
    assert not searches.resets.names(), "it is forgotten with its last connection"


def test_a_service_that_keeps_its_connections_from_now_on() -> None:
    searches = Searches(ONE)
    searches.resets.update(NAME, watched(grace=0.0), 0.0)
    assert searches.search(0.0) == {ONE.endpoint}
    assert not searches.resets.update(NAME, None, 1.0)
    assert searches.search(1.0) == set()


def test_another_service_that_serves_the_connection() -> None:
    """An endpoint that still gets connections by the frontend keeps all of them."""
    resets = Resets()
    resets.update(NAME, watched(grace=0.0), 0.0)
    stale = Stale(lambda _: {ONE.endpoint: READY}, lambda key: (key,), (), resets, 0.0)
    assert stale.ends(WEB, ONE.endpoint) is Ends.NONE


@given(some.lists(some.integers(0, 999), max_size=50))
def test_endpoints_without_connections_cost_nothing(numbers: list[int]) -> None:
    """Endpoints without connections cost nothing, however many endpoints and Services come and
    go.
    """
    searches = Searches()
    for now, number in enumerate(numbers):
        name = NAME._replace(service=f"web-{number % 7}")
        change = DELETED if number % 3 == 0 else watched(backend(number % 200 + 1))
        searches.resets.update(name, change, float(now))
        searches.search(float(now))
        assert searches.resets.due == math.inf
    searches.search(1e6)
    assert len(searches.resets.names().get(WEB, [])) <= 7


def test_a_shorter_grace() -> None:
    """A shorter grace applies to connections found before."""
    name, endpoint = port().name, backend(1).endpoint
    resets = Resets()
    resets.update(name, Watched(60.0, frozenset()), 1.0)
    assert resets.find([name], endpoint, 1.0) is None
    resets.searched(1.0)
    assert resets.due == 61.0
    resets.update(name, Watched(5.0, frozenset()), 2.0)
    assert resets.due == 6.0
    assert resets.find([name], endpoint, 6.0) == name
    resets.searched(6.0)
    assert resets.due == math.inf
