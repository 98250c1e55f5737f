# SPDX-License-Identifier: Apache-2.0
"""Which UDP backends plans remove, and whether other backends serve after it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from msgspec import structs

from ebpflb.agent.stale_udp.worker import RemovedBackends, removed_backends
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.desired import DesiredBackend, DesiredService
from ebpflb.plan.entries import WHOLE
from ebpflb.plan.flow_entries import StaleCandidates
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


@pytest.fixture
def planner() -> Planner:
    """It has programmed "dns" with the backends 1 and 2."""
    made = Planner(CAPACITY)
    removed_by(made, udp(1, 2))
    return made


def removed_by(
    planner: Planner, *ports: DesiredService | None, now: float = 0.0
) -> RemovedBackends:
    """What one plan removed."""
    planner.plan_changes({port.name if port else NAME: port for port in ports}, now)
    planner.written(now)
    return removed_backends(planner.take_backend_changes())


def ids(planner: Planner, name: PortName = NAME) -> dict[int, int]:
    """Backend -> id."""
    programmed = planner.actual[name]
    numbers = (int(b.address) & 255 for b in programmed.backends)
    return dict(zip(numbers, programmed.ids, strict=True))


def test_one_ends(planner: Planner) -> None:
    """A backend that is removed while another serves is reported once."""
    gone = ids(planner)[1]
    assert removed_by(planner, udp(2, 3)) == RemovedBackends(replaced=frozenset({gone}))
    assert removed_by(planner, udp(2, 3)) == RemovedBackends()


def test_all_end(planner: Planner) -> None:
    """Services with no serving endpoint are not cleaned, until they have one again."""
    both = frozenset(ids(planner).values())
    assert removed_by(planner, udp()) == RemovedBackends(orphaned=both)
    assert removed_by(planner, udp(3)) == RemovedBackends(served_again=True)


def test_service_is_deleted(planner: Planner) -> None:
    """A deleted service's flows are not cleaned, unless it comes again."""
    both = frozenset(ids(planner).values())
    assert removed_by(planner, None) == RemovedBackends(orphaned=both)
    assert removed_by(planner, udp(3)) == RemovedBackends(served_again=True)


def test_target_port_changes(planner: Planner) -> None:
    """An endpoint at its old port is stale though its address still serves."""
    gone = ids(planner)
    moved = tuple(structs.replace(b, port=9090) for b in udp(1, 2).backends)
    assert removed_by(planner, replace(udp(), backends=moved)).replaced == frozenset(gone.values())


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.SCTP])
def test_other_protocols(protocol: Protocol) -> None:
    """Backends of TCP and SCTP service ports do not count."""
    planner = Planner(CAPACITY)
    every = (udp(1, 2), udp(2), udp(), udp(3))
    ports = [replace(port, name=NAME._replace(protocol=protocol)) for port in every]
    for port in ports:
        assert not removed_by(planner, port)


def test_terminating_but_serving(planner: Planner) -> None:
    """An endpoint that is terminating and still serves its flows is not removed."""
    leaving = (*udp(2).backends, backend(1, SERVING))
    assert not removed_by(planner, replace(udp(), backends=leaving))


def test_service_changes_alone(planner: Planner) -> None:
    """Mere changes of the Service object remove no backend."""
    assert not removed_by(planner, replace(udp(1, 2), affinity_seconds=60))
    assert not removed_by(planner, udp(1, 2, number=2))


def candidates_after(planner: Planner, *ports: DesiredService | None) -> set[StaleCandidates]:
    """The connections that may be stale after one plan."""
    planner.take_backend_changes()
    planner.plan_changes({port.name if port else NAME: port for port in ports}, 0.0)
    return {each for change in planner.take_backend_changes() for each in change.candidates}


ONE = frontend(1)._replace(protocol=Protocol.UDP)
TWO = frontend(2)._replace(protocol=Protocol.UDP)


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
    """Nor when a backend ends that still serves its flows, a frontend goes, or of TCP."""
    assert not candidates_after(planner, udp(1, 2, 3))
    leaving = (*udp(2, 3).backends, backend(1, SERVING))
    assert not candidates_after(planner, replace(udp(), backends=leaving))
    tcp = NAME._replace(protocol=Protocol.TCP)
    assert not candidates_after(planner, replace(udp(1, 2, number=2), name=tcp))
    assert not candidates_after(planner, replace(udp(2, number=2), name=tcp))


def test_all_connections_may_be_stale_where_nobody_served(planner: Planner) -> None:
    """They may lead to anyone who served before, or to nobody."""
    assert not candidates_after(planner, udp())
    assert candidates_after(planner, udp(3)) == {StaleCandidates(ONE, None)}
    assert candidates_after(planner, udp(3, number=2)) == {StaleCandidates(TWO, None)}
    assert not candidates_after(planner, None)
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
    assert candidates_after(planner, port()) == {StaleCandidates(ONE, away.endpoint)}
    every = {StaleCandidates(ONE, None), StaleCandidates(TWO, None)}
    assert candidates_after(planner, port(away)) == every


def test_no_connection_is_to_an_address_as_a_whole(planner: Planner) -> None:
    """It has no port, so nothing is searched for."""
    whole = frontend(1)._replace(port=0, protocol=WHOLE)
    port = replace(udp(3), frontends={ONE: frozenset(), whole: frozenset({"passthrough"})})
    assert {each.frontend for each in candidates_after(planner, port)} == {ONE}
    assert not candidates_after(planner, replace(port, backends=()))


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
    assert removed_backends(planner.take_backend_changes()).replaced == frozenset(gone.values())


@given(histories.steps)
@settings(max_examples=scaled(60), deadline=None)
def test_every_history(steps: list[Step]) -> None:
    """Whatever happens, the removed ids are those that some service had and none has."""
    node = PlannedNode()
    for step in steps:
        node.wait(step.seconds)
        before = living(node)
        node.change(as_udp(histories.changes(node, step.edits)))
        removed = removed_backends(node.planner.take_backend_changes())
        assert removed.replaced | removed.orphaned == before - living(node)
        assert not removed.replaced & removed.orphaned


def as_udp(changes: dict[PortName, DesiredService | None]) -> dict[PortName, DesiredService | None]:
    found: dict[PortName, DesiredService | None] = {}
    for name, port in changes.items():
        name = name._replace(protocol=Protocol.UDP)
        found[name] = replace(port, name=name) if port else None
    return found


def living(node: PlannedNode) -> set[int]:
    return {id for programmed in node.planner.actual.values() for id in programmed.ids}


def moved(planner: Planner, *ports: DesiredService | None) -> bool:
    """Whether one plan moves a frontend from one of the ports "dns" and "two" to the other."""
    names = [NAME, NAME._replace(service="two")]
    changes = {
        name: port and replace(port, name=name) for name, port in zip(names, ports, strict=True)
    }
    planner.plan_changes(changes, 0.0)
    planner.written(0.0)
    return planner.frontends.take_udp_moved()


def test_frontend_moves(planner: Planner) -> None:
    """A frontend that passes to another port is told, at once or after nobody had it."""
    assert not planner.frontends.take_udp_moved()
    assert not moved(planner, udp(1, 2), udp(3, number=2))
    assert moved(planner, udp(1, 2, number=2), udp(3, number=1))
    assert not moved(planner, udp(1, 2, number=2), udp(3, number=1))
    assert not moved(planner, udp(1, 2, number=5), udp(3, number=1))
    assert moved(planner, udp(1, 2, number=5), udp(3, number=2))
    assert not moved(planner, None, udp(3, number=2))
    assert not planner.frontends.take_udp_moved()
