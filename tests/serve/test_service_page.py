# SPDX-License-Identifier: Apache-2.0
"""The page of a Service: which parts are used, and why others are not."""

from collections.abc import Iterable
from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from ebpflb.model import objects
from ebpflb.model.addresses import host_port
from ebpflb.model.annotations import FAILOVER_ANNOTATION
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.endpoints import Topology
from ebpflb.model.events import Changed, Key, Kind, ReadObject
from ebpflb.model.services import OF_KUBE_PROXY, Admission, WholeAddresses
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.planner import Planner
from ebpflb.plan.service_entries import NO_ENTRIES
from ebpflb.serve.service_page import (
    UNUSED,
    USED,
    EndpointRow,
    FrontendRow,
    ServiceFacts,
    ServicePage,
    make_service_page,
    port_facts,
    summary,
)
from tests.model import builders
from tests.model.builders import entry, ports_of
from tests.plan.builders import CAPACITY, desired_service

NODE = "here"


class Known:
    """A cluster, and the plan for it."""

    def __init__(self, capacity: Capacity = CAPACITY, admission: Admission = OF_KUBE_PROXY) -> None:
        self.cluster = ClusterState(NODE, admission=admission)
        self.planner = Planner(capacity)

    def apply(self, *found: objects.Service | objects.EndpointSlice) -> None:
        for each in found:
            kind = Kind.SERVICE if isinstance(each, objects.Service) else Kind.ENDPOINT_SLICE
            key = Key(each.metadata.namespace, each.metadata.name)
            self.cluster.apply(Changed(kind, key, ReadObject(each, "test")))

    def plan(self) -> None:
        for key in sorted(self.cluster.take_changed_services()):
            desired = {p.name: desired_service(p, s) for p, s in ports_of(self.cluster, key)}
            self.planner.plan_changes(desired, 0)
            self.planner.written(0)

    def page(self, name: str = "web") -> ServicePage:
        key, cluster = Key("shop", name), self.cluster
        facts = tuple(port_facts(port, self.planner) for port in cluster.services[key])
        topology = Topology(NODE, "")
        return make_service_page(ServiceFacts(key, facts, cluster.slices_for(key), topology))


def known(*found: Any, capacity: Capacity = CAPACITY) -> ServicePage:
    made = Known(capacity)
    made.apply(*found)
    made.plan()
    return made.page()


def told(rows: Iterable[EndpointRow]) -> dict[str, tuple[str, str]]:
    return {row.endpoint: (row.state, row.reason) for row in rows}


def test_shares_add_up() -> None:
    """Every endpoint of a list has the same chance, and other endpoints have none."""
    here = entry("10.1.0.1", nodeName=NODE)
    away = [entry(f"10.1.0.{number}", nodeName="away") for number in (2, 3, 4)]
    service = builders.service(
        type="NodePort", ports=[{"port": 80, "nodePort": 30080}], externalTrafficPolicy="Local"
    )
    page = known(service, builders.slice(here, *away))
    (port,) = page.ports
    assert [row.share for row in port.endpoints] == [0.25] * 4
    assert [row.local_share for row in port.endpoints] == [1, None, None, None]
    assert {row.not_local for row in port.endpoints[1:]} == {"on another node, under policy Local"}
    policies = {row.kind: (row.policy, row.endpoints) for row in port.frontends}
    assert policies == {"NodePort": ("Local", 1), "ClusterIP": ("Cluster", 4)}
    assert not page.problems


def test_packets_that_go_on_to_the_router() -> None:
    """A frontend shows the setting, and when it applies."""
    service = builders.service(
        type="LoadBalancer",
        ingress=[{"ip": "203.0.113.9"}],
        externalTrafficPolicy="Local",
        annotations={FAILOVER_ANNOTATION: "Passthrough"},
    )
    here, away = (entry(f"10.1.0.{n}", nodeName=node) for n, node in ((1, NODE), (2, "away")))
    problems = [
        ([here], ""),
        ([away], "no endpoint on this node: packets from outside go on to the router"),
        ([], "no endpoint: packets go on to the router"),
    ]
    for found, problem in problems:
        (port,) = known(service, builders.slice(*found)).ports
        (row,) = (row for row in port.frontends if row.kind != "ClusterIP")
        assert (row.policy, row.problem) == ("Local/Passthrough", problem)


def test_addresses_as_a_whole() -> None:
    """An address as a whole is shown at the port that stands for it; the list of Services is
    unchanged.
    """
    ports = [{"name": name, "port": port} for name, port in (("web", 80), ("tls", 443))]
    service = builders.service(type="LoadBalancer", ports=ports, ingress=[{"ip": "203.0.113.9"}])
    usual = known(service)
    made = Known(admission=Admission(whole_addresses=WholeAddresses.BALANCED))
    made.apply(service)
    made.plan()
    page = made.page()
    rows = [(port.port, row) for port in page.ports for row in port.frontends]
    (found,) = [(port, row) for port, row in rows if row.kind == "Address"]
    assert found == ("shop/web:web/TCP", FrontendRow("Address", "203.0.113.9", "Cluster"))
    assert summary(page) == summary(usual)


def test_address_claimed_by_an_older_service() -> None:
    """The younger Service's endpoints are not used, and the older Service is named."""
    made = Known()
    old, new = builders.service(name="old"), builders.service()
    made.apply(old, new, builders.slice(entry("10.1.0.1")))
    made.plan()
    page = made.page()
    assert told(page.ports[0].endpoints) == {
        "10.1.0.1:8080": (UNUSED, "other Services have every address: shop/old")
    }
    assert page.problems == ["172.30.0.41:80/TCP: Service shop/old has it"]


def test_no_space() -> None:
    """The full map is named at the port, at its frontends and at each endpoint."""
    full = CAPACITY._replace(backend_ids=2)
    page = known(
        builders.service(), builders.slice(*(entry(f"10.1.0.{n}") for n in range(9))), capacity=full
    )
    (port,) = page.ports
    reason = "no space: map backend_slots is full (2 entries)"
    assert {row.reason for row in port.endpoints} == {port.problem} == {reason}
    assert [row.problem for row in port.frontends] == [reason]


def test_a_row_counts_every_entry_once() -> None:
    """A row has ports in kubectl's format, and counts every entry once."""
    service = builders.service(type="NodePort", ports=[{"port": 80, "nodePort": 30080}])
    row = summary(
        known(
            service,
            builders.slice(entry("10.1.0.1"), entry("10.1.0.2", conditions={"ready": False})),
            builders.slice(entry("fd00::1"), family="IPv6", name="six"),
        )
    )
    assert (row.ports, row.addresses) == (["80:30080/TCP"], ["172.30.0.41"])
    assert (row.used, row.unused) == (1, 2)


CONDITIONS = some.fixed_dictionaries(
    {name: some.booleans() for name in ("ready", "serving", "terminating")}
)
ENTRIES = some.lists(
    some.builds(
        lambda number, node, conditions: entry(
            f"10.1.0.{number}", nodeName=node, conditions=conditions
        ),
        some.integers(1, 5),
        some.sampled_from([NODE, "away"]),
        CONDITIONS,
    ),
    max_size=6,
)
SPECS = some.fixed_dictionaries(
    {},
    optional={
        "internalTrafficPolicy": some.sampled_from(["Cluster", "Local"]),
        "externalTrafficPolicy": some.just("Local"),
        "type": some.just("NodePort"),
    },
)


@given(SPECS, ENTRIES, ENTRIES, some.sampled_from([1, 3, 64]))
def test_used_and_unused_partition_the_endpoints(
    spec: dict[str, Any], before: list[Any], after: list[Any], ids: int
) -> None:
    """After any history an endpoint is in the maps, or has a reason."""
    made = Known(CAPACITY._replace(backend_ids=ids))
    ports = [{"port": 80, "nodePort": 30080 if "type" in spec else 0}]
    for entries in (before, after):
        made.apply(builders.service(ports=ports, **spec), builders.slice(*entries))
        made.plan()
    (page,) = made.page().ports
    rows = [row.endpoint for row in page.endpoints]
    assert len(rows) == len(set(rows)) >= len({each["addresses"][0] for each in after})
    (port,) = made.cluster.services[Key("shop", "web")]
    held = made.planner.actual[port.name] if page.id else NO_ENTRIES
    used = {host_port(b.address, b.port) for b in held.backends if b.flags & held.used_lists}
    assert {row.endpoint for row in page.endpoints if row.state == USED} == used
    for row in page.endpoints:
        assert row.state == USED or row.reason
    for shares in ([r.share for r in page.endpoints], [r.local_share for r in page.endpoints]):
        given_shares = [share for share in shares if share]
        assert not given_shares or abs(sum(given_shares) - 1) < 1e-9


def test_not_written_yet() -> None:
    """Between an event and its sync the page shows the maps, and the coming changes."""
    made = Known()
    made.apply(builders.service(), builders.slice(entry("10.1.0.1")))
    assert told(made.page().ports[0].endpoints) == {"10.1.0.1:8080": (UNUSED, "not written yet")}
    made.plan()
    made.apply(builders.slice(entry("10.1.0.2")))
    assert told(made.page().ports[0].endpoints) == {
        "10.1.0.1:8080": (USED, "no longer in a slice, removal not written yet"),
        "10.1.0.2:8080": (UNUSED, "not written yet"),
    }
