# SPDX-License-Identifier: Apache-2.0
"""Services are planned in slices, and the namespaces take turns."""

import math
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import IPv4Address

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from ebpflb.agent.service_sync import BURST, RATE, SLICE_COST, Backlog, Budget, Step
from ebpflb.entries.services import Frontend
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.model.addresses import Family
from ebpflb.model.events import Changed, Key, Kind, Removed, Together
from ebpflb.model.services import PortName, Protocol
from tests.agent.fakes import Harness, changed, listed, service, slices
from tests.load import scaled

NOW = 1000.0
_costs = some.lists(some.integers(1, 2 * SLICE_COST), max_size=6)
_services = some.dictionaries(
    some.builds(Key, some.sampled_from("abc"), some.sampled_from("xyz")), _costs, min_size=1
)


def port(key: Key, number: int) -> PortName:
    return PortName(key.namespace, key.name, str(number), Protocol.TCP, Family.IPV4)


def backlog_of(services: dict[Key, list[int]]) -> Backlog:
    """Return a backlog; each Service has one port for each of these costs."""

    def begin(key: Key) -> Iterator[Step]:
        return (Step(cost, {port(key, at): None}) for at, cost in enumerate(services[key]))

    return Backlog(begin, Budget(lambda: NOW))


_SHORT_SERVICES = {
    Key("a", "x"): [],
    Key("a", "y"): [1, 1],
    Key("a", "z"): [1024, 1987],
    Key("b", "x"): [1, 1, 1, 202],
    Key("b", "z"): [156],
    Key("c", "x"): [1, 1, 815, 1024, 1024],
}  # a namespace that lost a turn whenever a Service ended would wait for too long


@given(_services)
@example(_SHORT_SERVICES)
@settings(max_examples=scaled(100), deadline=None)
def test_each_namespace_takes_its_turn(services: dict[Key, list[int]]) -> None:
    """However much one namespace has to do, the next port of another one is planned within as many
    slices as there are namespaces; no port is left out.
    """
    backlog = backlog_of(services)
    backlog.add(services)
    waited = dict.fromkeys((key.namespace for key, costs in services.items() if costs), 0)
    left = {port(key, at) for key, costs in services.items() for at in range(len(costs))}
    while backlog:
        taken = backlog.take_slice(NOW).keys()
        left -= taken
        for namespace in waited:
            is_served = namespace in {name.namespace for name in taken}
            is_done = namespace not in {name.namespace for name in left}
            waited[namespace] = 0 if is_served or is_done else waited[namespace] + 1
        assert max(waited.values(), default=0) <= len(waited)
    assert not left


def test_a_step_larger_than_a_slice_delays_no_other_one() -> None:
    """A large step is taken alone; the port of the other namespace is written before or after
    it.
    """
    large, small = Key("a", "x"), Key("b", "y")
    services = {large: [10, 3 * SLICE_COST, 3 * SLICE_COST], small: [10, 10]}
    backlog = backlog_of(services)
    backlog.add(services)
    taken = []
    while backlog:
        taken.append([(name.namespace, name.port) for name in backlog.take_slice(NOW)])
    assert taken == [[("a", "0"), ("b", "0")], [("a", "1")], [("b", "1")], [("a", "2")], []]


def test_what_changes_meanwhile_is_planned_once_more() -> None:
    """A Service that changes during its steps is planned again after them, not from the start, so
    its last port is reached however often the Service changes.
    """
    key = Key("a", "x")
    backlog = backlog_of({key: [SLICE_COST] * 3})
    taken = []
    for _ in range(4):
        backlog.add([key])
        assert key in backlog
        taken += [name.port for name in backlog.take_slice(NOW)]
    assert taken == ["0", "1", "2", "0"]


def test_a_namespace_uses_a_part_of_a_processor() -> None:
    """A namespace that has used more CPU time than its share begins no Service until time makes up
    for it. In between other namespaces do, and all its changes are planned once.
    """
    now = [NOW]
    flood, other = Key("flood", "x"), Key("other", "y")
    budget = Budget(lambda: now[0])
    steps = {flood: 2, other: 1}
    backlog = Backlog(
        lambda key: iter([Step(SLICE_COST, {port(key, 0): None})] * steps[key]), budget
    )
    used, began = 0.0, now[0]
    while now[0] < began + 60:
        backlog.add([flood])
        if backlog.due <= now[0]:
            took = 0.5 if backlog.take_slice(now[0]) else 0.0
            backlog.spent(took)
            used, now[0] = used + took, now[0] + took
        else:
            assert backlog
            backlog.add([other])
            assert [name.namespace for name in backlog.take_slice(now[0])] == ["other"]
            backlog.spent(0.0)
            now[0] = max(backlog.due, now[0] + 0.01)
    assert used == pytest.approx(BURST + 60 * RATE, abs=1.0)
    now[0] += BURST / RATE + 10
    budget.spend("other", 0.1)
    assert budget.held_until("flood") == -math.inf, "it is forgotten"


def test_a_service_with_many_ports_holds_no_other_one_up(harness: Harness) -> None:
    """The large Service is written in several plans, the other one with the first of them; in the
    end the large one is complete, and it is removed when it is deleted.
    """
    harness.options = replace(harness.options, manifests=None)
    harness.start()
    harness.send(
        listed(Kind.SERVICE, service("a", "10.96.0.1")),
        listed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.1")),
        listed(Kind.NODE),
    )
    ports = [{"name": f"p{number}", "port": number} for number in range(1, 301)]
    big = manifests.service("big", ["10.96.0.7"], ports, namespace="tenant")
    before = len(harness.datapath.plans)
    small = changed(Kind.ENDPOINT_SLICE, slices("a", "10.1.0.77"))
    harness.send(Together((changed(Kind.SERVICE, big), small)))
    address, written = IPv4Address("10.96.0.7"), harness.datapath.maps.services
    every = {Frontend(address, number, 6) for number in range(1, 301)}
    wait_until("all of it is written", lambda: every <= written.keys())
    plans = harness.datapath.plans[before:]
    assert any(slot.address == IPv4Address("10.1.0.77") for _, slot in plans[0].slots)
    assert len(plans) > 3
    harness.send(Removed(Kind.SERVICE, Key("tenant", "big")))
    wait_until("all of it has gone", lambda: every.isdisjoint(list(written)))


IPS = [f"10.1.{number // 250}.{number % 250 + 1}" for number in range(3000)]


def two_ports(*names: str) -> tuple[Changed, Changed]:
    """Return a Service whose ports have these names, with endpoints for several slices of the
    loop.
    """
    spec = [{"name": it, "port": 80 + at} for at, it in enumerate(names)]
    endpoints = [manifests.endpoint(ip, node="node-1", target="p") for ip in IPS]
    named = [{"name": it, "port": 8080, "protocol": "TCP"} for it in names]
    made = manifests.service("big", ["10.96.0.7"], spec)
    its = manifests.endpoint_slice("big", "IPv4", endpoints, named)
    return changed(Kind.SERVICE, made), changed(Kind.ENDPOINT_SLICE, its)


def test_a_port_that_is_renamed_is_served_all_the_time(harness: Harness) -> None:
    """One plan removes the old name and adds the new one, however many endpoints they have."""
    harness.options = replace(harness.options, manifests=None)
    harness.start()
    harness.send(listed(Kind.SERVICE), listed(Kind.ENDPOINT_SLICE), listed(Kind.NODE))
    harness.send(*two_ports("a", "b"))
    frontends = {Frontend(IPv4Address("10.96.0.7"), port, 6) for port in (80, 81)}
    written = harness.datapath.maps.services
    wait_until("it is served", lambda: frontends <= written.keys())
    harness.send(*two_ports("b", "c"))
    actual = harness.service_sync.planner.actual
    wait_until("it is renamed", lambda: {name.port for name in [*actual]} == {"b", "c"})
    removed = [each for plan in harness.datapath.plans for each in plan.removed_services]
    assert not frontends.intersection(removed)
    assert frontends <= written.keys()


def test_what_one_write_of_a_manifest_changes_is_one_plan(harness: Harness) -> None:
    """A cluster IP moves to another Service in one plan, though the endpoints need several slices
    of the loop.
    """
    harness.start()
    harness.send(listed(Kind.SERVICE), listed(Kind.ENDPOINT_SLICE), listed(Kind.NODE))
    harness.send(Together(two_ports("a", "b")))
    endpoints = [manifests.endpoint(ip, node="node-1", target="p") for ip in IPS]
    ports = [{"name": it, "port": 8080, "protocol": "TCP"} for it in ("a", "b")]
    spec = [{"name": "a", "port": 80}, {"name": "b", "port": 81}]
    moved = (
        Removed(Kind.SERVICE, Key("default", "big")),
        changed(Kind.SERVICE, manifests.service("other", ["10.96.0.7"], spec)),
        changed(Kind.ENDPOINT_SLICE, manifests.endpoint_slice("other", "IPv4", endpoints, ports)),
    )
    before = len(harness.datapath.plans)
    harness.send(Together(moved))
    written = harness.datapath.plans[before:]
    (plan,) = [it for it in written if it.services or it.removed_services]
    assert len(plan.services) == 2
    assert not plan.removed_services
