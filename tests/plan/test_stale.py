# SPDX-License-Identifier: Apache-2.0
"""Which UDP backends a plan makes stale, and where flows to them may go."""

from dataclasses import replace
from ipaddress import ip_address

import pytest
from hypothesis import given, settings

from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.desired_service import DesiredService
from ebpflb.plan.entries import Backend, Flags, Range, Service
from ebpflb.plan.flow_entries import FlowState, gather, state
from ebpflb.plan.planner import Planner
from ebpflb.plan.stale import Stale, Stranded, heirs
from tests.plan import histories
from tests.plan.builders import BOTH, CAPACITY, CLUSTER, LOCAL, SERVING, backend, desired, frontend
from tests.plan.histories import Step
from tests.plan.node import Node

CLIENT = (ip_address("10.1.0.200"), 40000)


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
    turn(made, udp(1, 2))
    return made


def turn(planner: Planner, *ports: DesiredService | None, now: float = 0.0) -> Stale:
    """What one plan made stale."""
    planner.change({port.name if port else NAME: port for port in ports}, now)
    planner.applied(now)
    return planner.stale.take()


def ids(planner: Planner, name: PortName = NAME) -> dict[int, int]:
    """Backend -> id."""
    programmed = planner.actual[name]
    numbers = (int(b.address) & 255 for b in programmed.backends)
    return dict(zip(numbers, programmed.ids, strict=True))


def test_one_ends(planner: Planner) -> None:
    """A backend that leaves while another serves is stale; it is said once."""
    gone = ids(planner)[1]
    assert turn(planner, udp(2, 3)) == Stale(ended=frozenset({gone}))
    assert turn(planner, udp(2, 3)) == Stale()


def test_all_end(planner: Planner) -> None:
    """Services with no serving endpoint are not cleaned, until they have one again."""
    both = frozenset(ids(planner).values())
    assert turn(planner, udp()) == Stale(orphaned=both)
    assert turn(planner, udp(3)) == Stale(revived=True)


def test_service_is_deleted(planner: Planner) -> None:
    """A deleted service's flows are not cleaned, unless it comes again."""
    both = frozenset(ids(planner).values())
    assert turn(planner, None) == Stale(orphaned=both)
    assert turn(planner, udp(3)) == Stale(revived=True)


def test_target_port_changes(planner: Planner) -> None:
    """An endpoint at its old port is stale though its address still serves."""
    gone = ids(planner)
    moved = tuple(b._replace(port=9090) for b in udp(1, 2).backends)
    assert turn(planner, replace(udp(), backends=moved)).ended == frozenset(gone.values())


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.SCTP])
def test_other_protocols(protocol: Protocol) -> None:
    """TCP and SCTP flows are never stale."""
    planner = Planner(CAPACITY)
    every = (udp(1, 2), udp(2), udp(), udp(3))
    ports = [replace(port, name=NAME._replace(protocol=protocol)) for port in every]
    for port in ports:
        assert not turn(planner, port)


def test_terminating_but_serving(planner: Planner) -> None:
    """Flows to an endpoint that only serves what it has survive."""
    leaving = (*udp(2).backends, backend(1, SERVING))
    assert not turn(planner, replace(udp(), backends=leaving))


def test_service_changes_alone(planner: Planner) -> None:
    """Mere changes of the Service object make nothing stale."""
    assert not turn(planner, replace(udp(1, 2), affinity_seconds=60))
    assert not turn(planner, udp(1, 2, number=2))


def test_gathers(planner: Planner) -> None:
    """Plans that follow each other before anyone asks are taken together."""
    gone = ids(planner)
    planner.change({NAME: udp(2, 3)}, 0)
    planner.change({NAME: udp(3)}, 0)
    assert planner.stale.take().ended == frozenset(gone.values())


@given(histories.steps)
@settings(max_examples=60, deadline=None)
def test_every_history(steps: list[Step]) -> None:
    """Whatever happens, the ids that are stale are those that some service had and none has."""
    node = Node()
    for step in steps:
        node.wait(step.seconds)
        before = living(node)
        node.change(as_udp(histories.changes(node, step.edits)))
        stale = node.planner.stale.take()
        assert stale.ended | stale.orphaned == before - living(node)
        assert not stale.ended & stale.orphaned


def as_udp(changes: dict[PortName, DesiredService | None]) -> dict[PortName, DesiredService | None]:
    found: dict[PortName, DesiredService | None] = {}
    for name, port in changes.items():
        name = name._replace(protocol=Protocol.UDP)
        found[name] = replace(port, name=name) if port else None
    return found


def living(node: Node) -> set[int]:
    return {id for programmed in node.planner.actual.values() for id in programmed.ids}


BLOCK = [(1, CLUSTER), (2, BOTH), (3, LOCAL), (4, SERVING)]


def service(*flags: str, affinity: int = 0) -> tuple[Service, list[Backend]]:
    """A block with a backend in each list, from slot 12 on."""
    block = [
        Backend(ip_address(f"10.1.0.{number}"), 8080, words, number, 7) for number, words in BLOCK
    ]
    ranges = Range(12, 2), Range(13, 2)
    return Service(frontend(1), 7, frozenset(flags), affinity, 4, *ranges), block


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {1, 2}),
        (("local",), {2, 3}),
        (("external",), {1, 2}),
        (("external", "local"), {1, 2}),
    ],
)
def test_heirs(flags: Flags, expected: set[int]) -> None:
    """A flow goes where its socket would be sent, by the policy of what it asked for."""
    assert {heir.id for heir in heirs(*service(*flags), CLIENT)} == expected


def test_heirs_are_spread() -> None:
    """Clients are spread over all; under session affinity those of one address are together."""
    ports = range(1000, 1100)
    first = {next(heirs(*service(), (CLIENT[0], port))).id for port in ports}
    assert first == {1, 2}
    first = {next(heirs(*service(affinity=60), (CLIENT[0], port))).id for port in ports}
    assert len(first) == 1


def test_not_to_itself() -> None:
    """A client is no heir of its own flow: that would need a masquerade."""
    itself = ip_address("10.1.0.1"), 40000
    assert [heir.id for heir in heirs(*service(), itself)] == [2]


def test_no_heir() -> None:
    """Where only those serve who serve what they have, nobody inherits."""
    found, block = service()
    none = found._replace(slots=1, cluster=Range(12, 0), local=Range(12, 0))
    assert list(heirs(none, block[3:], CLIENT)) == []


@pytest.mark.parametrize("address", ["10.1.0.9", "fd00::9"])
def test_entries(address: str) -> None:
    """The two entries are one flow as the packet path keeps it, that has gone both ways."""
    _, block = service()
    former = ip_address(address), 5353
    entries = Stranded(CLIENT, former).entries(block[0], 5)
    for key, flow in entries.items():
        assert gather(key, flow, entries.get) == entries
    assert state(Protocol.UDP, [flow.flags for flow in entries.values()]) == FlowState.BOTH_WAYS
    request = entries[Stranded(CLIENT, former).asked]
    assert (request.address, request.port) == (block[0].address, block[0].port)
    answer = entries[Stranded(CLIENT, former).answered(block[0].address, block[0].port)]
    assert (answer.address, answer.port) == former
    assert {(flow.service, flow.backend) for flow in entries.values()} == {(7, 1)}
