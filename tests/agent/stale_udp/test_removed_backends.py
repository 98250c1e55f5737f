# SPDX-License-Identifier: Apache-2.0
"""Which UDP backends plans remove, and whether other backends serve after it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from msgspec import structs

from ebpflb.entries.flows import StaleCandidates, Unanswered
from ebpflb.entries.services import WHOLE
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.desired import DesiredBackend, DesiredService
from ebpflb.plan.planner import Planner
from tests.load import scaled
from tests.plan import histories
from tests.plan.builders import BOTH, CAPACITY, SERVING, backend, desired, frontend
from tests.plan.histories import Step
from tests.plan.node import PlannedNode


def udp(*backends: int, number: int = 1) -> DesiredService:
    """The service "dns" over UDP with these backends."""
    at = frontend(number)._replace(protocol=Protocol.UDP)
    port = desired("dns", {at: frozenset({"endpoints"})}, backends)
    return replace(port, name=port.name._replace(protocol=Protocol.UDP))


NAME = udp().name
ONE = frontend(1)._replace(protocol=Protocol.UDP)
TWO = frontend(2)._replace(protocol=Protocol.UDP)


@pytest.fixture
def planner() -> Planner:
    """It has programmed "dns" with the backends 1 and 2."""
    made = Planner(CAPACITY)
    lost_by(made, udp(1, 2))
    return made


def lost_by(planner: Planner, *ports: DesiredService | None, now: float = 0.0) -> set[int]:
    """The ids whose sockets may be stale after one plan."""
    planner.plan_changes({port.name if port else NAME: port for port in ports}, now)
    planner.written(now)
    return {id for change in planner.take_backend_changes() for id in change.ids}


def ids(planner: Planner, name: PortName = NAME) -> dict[int, int]:
    """Backend -> id."""
    programmed = planner.actual[name]
    numbers = (int(b.address) & 255 for b in programmed.backends)
    return dict(zip(numbers, programmed.ids, strict=True))


def test_one_ends(planner: Planner) -> None:
    """A backend that is removed is reported once."""
    gone = ids(planner)[1]
    assert lost_by(planner, udp(2, 3)) == {gone}
    assert not lost_by(planner, udp(2, 3))


@pytest.mark.parametrize("left", [udp(), None], ids=["no endpoint", "no Service"])
def test_all_end(planner: Planner, left: DesiredService | None) -> None:
    """The sockets end even if no other backend serves: a stranger may get the address."""
    both = {*ids(planner).values()}
    assert lost_by(planner, left) == both
    assert not lost_by(planner, udp(3))


def test_target_port_changes(planner: Planner) -> None:
    """An endpoint at its old port is stale though its address still serves."""
    gone = {*ids(planner).values()}
    moved = tuple(structs.replace(b, port=9090) for b in udp(1, 2).backends)
    assert lost_by(planner, replace(udp(), backends=moved)) == gone


def test_terminating_but_serving(planner: Planner) -> None:
    """An endpoint that is terminating and still serves its flows is not removed."""
    leaving = (*udp(2).backends, backend(1, SERVING))
    assert not lost_by(planner, replace(udp(), backends=leaving))


def test_frontends_change(planner: Planner) -> None:
    """Where a frontend is lost sockets of all backends may be stale; otherwise none are."""
    both = {*ids(planner).values()}
    assert not lost_by(planner, replace(udp(1, 2), affinity_seconds=60))
    assert not lost_by(planner, replace(udp(1, 2), frontends={ONE: frozenset(), TWO: frozenset()}))
    assert lost_by(planner, udp(1, 2, number=2)) == both


def candidates_after(planner: Planner, *ports: DesiredService | None) -> set[StaleCandidates]:
    """The connections that may be stale after one plan."""
    planner.take_backend_changes()
    planner.plan_changes({port.name if port else NAME: port for port in ports}, 0.0)
    return {each for change in planner.take_backend_changes() for each in change.candidates}


def test_connections_to_a_removed_backend_may_be_stale(planner: Planner) -> None:
    """At each frontend, also where the endpoint is listed but does not serve any more."""
    assert candidates_after(planner, udp(2, 3)) == {StaleCandidates(ONE, backend(1).endpoint)}
    both = replace(udp(2, 3), frontends={ONE: frozenset(), TWO: frozenset()})
    assert candidates_after(planner, both) == {StaleCandidates(TWO, None)}
    gone = backend(2).endpoint
    fewer = replace(both, backends=udp(3).backends)
    assert candidates_after(planner, fewer) == {
        StaleCandidates(ONE, gone),
        StaleCandidates(TWO, gone),
    }


def test_no_connections_are_stale_when_backends_are_added(planner: Planner) -> None:
    """Nor when a backend ends that still serves its flows, or of TCP."""
    assert not candidates_after(planner, udp(1, 2, 3))
    leaving = (*udp(2, 3).backends, backend(1, SERVING))
    assert not candidates_after(planner, replace(udp(), backends=leaving))
    tcp = NAME._replace(protocol=Protocol.TCP)
    assert not candidates_after(planner, replace(udp(1, 2, number=2), name=tcp))
    assert not candidates_after(planner, replace(udp(2, number=2), name=tcp))


def test_connections_of_the_last_endpoint_may_be_stale(planner: Planner) -> None:
    """Connections to each removed backend are stale; when a backend serves again, all are."""
    gone = {StaleCandidates(ONE, backend(number).endpoint) for number in (1, 2)}
    assert candidates_after(planner, udp()) == gone
    assert candidates_after(planner, udp(3)) == {StaleCandidates(ONE, None)}


def test_all_connections_to_a_lost_frontend_may_be_stale(planner: Planner) -> None:
    """Where the Service goes, or changes its frontend."""
    every = {StaleCandidates(ONE, None), StaleCandidates(TWO, None)}
    assert candidates_after(planner, udp(1, 2, number=2)) == every
    assert candidates_after(planner, None) == {StaleCandidates(TWO, None)}
    assert candidates_after(planner, udp(3, number=2)) == {StaleCandidates(TWO, None)}


def test_connections_where_packets_go_on_to_the_router(planner: Planner) -> None:
    """Those to a removed backend, and those to the network where a backend comes to this node."""
    passing = frozenset({"external", "local", "passthrough"})

    def port(*backends: DesiredBackend) -> DesiredService:
        made = replace(udp(), frontends={ONE: passing, TWO: frozenset()})
        return replace(made, backends=backends)

    away, here = backend(2), backend(3, BOTH)
    candidates_after(planner, port(away))
    assert candidates_after(planner, port(away, here)) == {StaleCandidates(ONE, None)}
    assert candidates_after(planner, port(away)) == {
        StaleCandidates(ONE, here.endpoint),
        StaleCandidates(TWO, here.endpoint),
    }
    assert candidates_after(planner, port()) == {
        StaleCandidates(ONE, away.endpoint),
        StaleCandidates(TWO, away.endpoint),
    }
    every = {StaleCandidates(ONE, None), StaleCandidates(TWO, None)}
    assert candidates_after(planner, port(away)) == every


def test_no_connection_is_to_an_address_as_a_whole(planner: Planner) -> None:
    """It has no port, so nothing is searched for."""
    whole = frontend(1)._replace(port=0, protocol=WHOLE)
    port = replace(udp(3), frontends={ONE: frozenset(), whole: frozenset({"passthrough"})})
    assert {each.frontend for each in candidates_after(planner, port)} == {ONE}
    assert {each.frontend for each in candidates_after(planner, None)} == {ONE}


def test_connections_to_a_frontend_that_moves_may_be_stale(planner: Planner) -> None:
    """The port that gets it names them, whichever backends the other one had."""
    other = replace(udp(3, number=2), name=NAME._replace(service="two"))
    assert candidates_after(planner, other) == {StaleCandidates(TWO, None)}
    assert candidates_after(
        planner, udp(1, 2, number=2), replace(other, frontends={ONE: frozenset()})
    ) == {
        StaleCandidates(ONE, None),
        StaleCandidates(TWO, None),
    }


def test_gathers(planner: Planner) -> None:
    """The changes of several plans are taken together."""
    gone = ids(planner)
    planner.plan_changes({NAME: udp(2, 3)}, 0)
    planner.plan_changes({NAME: udp(3)}, 0)
    lost = {id for change in planner.take_backend_changes() for id in change.ids}
    assert lost == {*gone.values()}


@given(histories.steps)
@settings(max_examples=scaled(60), deadline=None)
def test_every_history(steps: list[Step]) -> None:
    """Whatever happens, each id that some service port had and none has is reported."""
    node = PlannedNode()
    for step in steps:
        node.wait(step.seconds)
        before = living(node)
        node.change(as_udp(histories.changes(node, step.edits)))
        lost = {id for change in node.planner.take_backend_changes() for id in change.ids}
        assert before - living(node) <= lost <= before


def as_udp(changes: dict[PortName, DesiredService | None]) -> dict[PortName, DesiredService | None]:
    found: dict[PortName, DesiredService | None] = {}
    for name, port in changes.items():
        name = name._replace(protocol=Protocol.UDP)
        found[name] = replace(port, name=name) if port else None
    return found


def living(node: PlannedNode) -> set[int]:
    return {id for programmed in node.planner.actual.values() for id in programmed.ids}


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.SCTP])
def test_what_removed_and_set_aside_endpoints_have_not_answered(protocol: Protocol) -> None:
    """Connections to them begin again; those to endpoints that terminate, or come back, do not."""

    planned = Planner(CAPACITY)

    def change(*backends: DesiredBackend) -> tuple[set[int], set[Unanswered]]:
        name = NAME._replace(protocol=protocol)
        at = {frontend(1)._replace(protocol=protocol): frozenset[str]()}
        port = replace(udp(), name=name, frontends=at, backends=backends)
        planned.plan_changes({name: port if backends else None}, 0.0)
        planned.written(0.0)
        changes = planned.take_backend_changes()
        return (
            {id for each in changes for id in each.ids},
            {each for it in changes for each in it.unanswered},
        )

    def unanswered(*numbers: int) -> set[Unanswered]:
        return {Unanswered(protocol, backend(number).endpoint) for number in numbers}

    one, two, three = backend(1), backend(2), backend(3)
    aside = structs.replace(backend(1, SERVING), is_set_aside=True)
    assert change(one, two, three) == (set(), set())
    assert change(two, three, backend(1, SERVING)) == (set(), set()), "it terminates"
    change(one, two, three)
    found = ids(planned, NAME._replace(protocol=protocol))
    assert change(two, three, aside) == ({found[1]}, unanswered(1))
    assert change(three, aside) == ({found[2]}, unanswered(2)), "the other is aside already"
    assert change(one, three) == (set(), set())
    assert change() == ({found[1], found[3]}, unanswered(1, 3))
