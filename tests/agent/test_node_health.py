# SPDX-License-Identifier: Apache-2.0
"""The agent sets aside the endpoints on silent nodes, says so, and brings them back."""

from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest

from ebpflb.agent.node_health import read_key
from ebpflb.agent.node_watch import Wanted
from ebpflb.errors import ConfigurationError
from ebpflb.lab import manifests
from ebpflb.model.annotations import HEALTH_ANNOTATION, HEALTH_NODES, HEALTH_OFF, HEALTH_PASSIVE
from ebpflb.model.endpoint_health import Outcome, Outcomes
from ebpflb.model.events import Key, Kind, Removed
from ebpflb.model.node_health import SilentNodes
from ebpflb.options import Options, Paths
from tests.agent.fakes import AGENTS, WEB, Harness, Json, changed, lists, service, used, value

NODES = {"node-1": "192.0.2.1", "node-2": "192.0.2.2", "node-3": "192.0.2.3"}
IPS = {"10.1.0.1": "node-1", "10.1.0.2": "node-2", "10.1.0.3": "node-3", "10.1.0.4": "node-2"}
ON_TWO = {"10.1.0.2", "10.1.0.4"}
PORT = 10246


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """A Service with four endpoints on three nodes, each with an agent."""
    made = Harness(tmp_path)
    key = Path("/nowhere/key")  # the fake needs none
    made.options = replace(made.options, endpoint_health=HEALTH_NODES, node_health_key=key)
    made.start()
    made.send(*lists(service("web", "10.96.0.1")))
    made.send(changed(Kind.ENDPOINT_SLICE, on_nodes("web", IPS)))
    made.send(changed(Kind.ENDPOINT_SLICE, agents(NODES)))
    yield made
    made.stop()
    assert made.error is None


def on_nodes(name: str, ips: dict[str, str], **conditions: bool) -> Json:
    entries = [
        manifests.endpoint(ip, node=node, target=f"pod-{ip}", **conditions)
        for ip, node in ips.items()
    ]
    return manifests.endpoint_slice(name, "IPv4", entries, [{"port": 8080, "protocol": "TCP"}])


def agents(nodes: dict[str, str]) -> Json:
    entries = [manifests.endpoint(ip, node=node, target=node) for node, ip in nodes.items()]
    port = {"name": "nodes", "port": PORT, "protocol": "UDP"}
    namespace, name = AGENTS
    return manifests.endpoint_slice(name, "IPv4", entries, [port], namespace=namespace)


def silent(harness: Harness, *nodes: str, noticed: bool = True) -> None:
    found = frozenset(nodes)
    harness.agent.inbox.put(SilentNodes(found, found if noticed else frozenset()))
    harness.send()


def test_the_endpoints_of_a_silent_node_get_no_connections(harness: Harness) -> None:
    """All of them, more than a third; an Event of the Service, metrics and status say so."""
    by_nodes = harness.agent.node_health
    harness.metrics.set_aside(lambda: by_nodes.count, lambda: by_nodes.times)
    silent(harness, "node-2")
    assert used(harness) == IPS.keys() - ON_TWO
    assert len(harness.agent.service_sync.planner.actual[WEB].backends) == len(IPS)
    [(about, note)] = harness.set_aside
    assert about == Key("default", "web")
    assert note == (
        "endpoints 10.1.0.2:8080, 10.1.0.4:8080 are set aside on this node and others: their node"
        " node-2 does not answer"
    )
    assert harness.status.set_aside == {"default/web/TCP": "10.1.0.2:8080, 10.1.0.4:8080"}
    assert value(harness, "ebpflb_endpoints_set_aside") == len(ON_TWO)
    assert value(harness, "ebpflb_endpoint_set_aside_total") == len(ON_TWO)
    silent(harness)
    assert used(harness) == IPS.keys()
    assert not harness.status.set_aside
    assert value(harness, "ebpflb_endpoints_set_aside") == 0


def test_only_the_node_that_noticed_it_first_writes_events(harness: Harness) -> None:
    """Otherwise thousands of agents would write about the same Services."""
    silent(harness, "node-2", noticed=False)
    assert used(harness) == IPS.keys() - ON_TWO
    assert not harness.set_aside


def test_without_other_ready_endpoints_all_are_used(harness: Harness) -> None:
    silent(harness, "node-1", "node-2", "node-3")
    assert used(harness) == IPS.keys()
    assert not harness.status.set_aside
    only = {ip: node for ip, node in IPS.items() if node == "node-2"}
    harness.send(changed(Kind.ENDPOINT_SLICE, on_nodes("web", only)))
    silent(harness, "node-2")
    assert used(harness) == ON_TWO


def test_endpoints_that_come_and_go_are_judged_too(harness: Harness) -> None:
    silent(harness, "node-2")
    harness.send(changed(Kind.ENDPOINT_SLICE, on_nodes("web", {**IPS, "10.1.0.5": "node-2"})))
    assert used(harness) == IPS.keys() - ON_TWO
    assert harness.agent.node_health.count == len(ON_TWO) + 1
    harness.send(changed(Kind.ENDPOINT_SLICE, on_nodes("web", {"10.1.0.2": "node-2"})))
    assert used(harness) == {"10.1.0.2"}
    assert harness.agent.node_health.count == 0


def test_those_of_clients_failures_are_used_before_those_of_silent_nodes(harness: Harness) -> None:
    """If nothing else is left; each reason ends by itself."""
    silent(harness, "node-2", "node-3")
    place = ip_address("10.1.0.1"), 8080
    harness.agent.inbox.put(Outcomes((Outcome(WEB, place, False, True),)))
    harness.send()
    assert used(harness) == {"10.1.0.1"}
    silent(harness)
    assert used(harness) == IPS.keys() - {"10.1.0.1"}


def test_nodes_are_those_of_the_agents_and_only_if_a_service_wants_it(harness: Harness) -> None:
    addresses = {node: ip_address(ip) for node, ip in NODES.items()}
    assert harness.node_watch.wanted == Wanted(addresses, PORT)
    harness.send(changed(Kind.ENDPOINT_SLICE, agents({"node-1": "192.0.2.1"})))
    assert harness.node_watch.wanted
    assert harness.node_watch.wanted.nodes.keys() == {"node-1"}
    off = service("web", "10.96.0.1", {HEALTH_ANNOTATION: HEALTH_OFF})
    silent(harness, "node-2")
    harness.send(changed(Kind.SERVICE, off))
    assert harness.node_watch.wanted is None
    assert used(harness) == IPS.keys()


def test_a_service_with_clients_alone_is_not_judged_by_nodes(harness: Harness) -> None:
    passive = service("web", "10.96.0.1", {HEALTH_ANNOTATION: HEALTH_PASSIVE})
    harness.send(changed(Kind.SERVICE, passive))
    silent(harness, "node-2")
    assert used(harness) == IPS.keys()


def test_a_deleted_service_leaves_nothing(harness: Harness) -> None:
    silent(harness, "node-2")
    harness.send(Removed(Kind.SERVICE, Key("default", "web")))
    assert harness.agent.node_health.count == 0
    assert not harness.agent.cluster.unhealthy


def test_the_port_of_udp_is_judged_too(harness: Harness) -> None:
    """What its node says does not depend on the protocol."""
    ports = [{"port": 53, "protocol": "UDP"}]
    harness.send(changed(Kind.SERVICE, manifests.service("dns", ["10.96.0.2"], ports)))
    entries = [manifests.endpoint(ip, node=node, target=ip) for ip, node in IPS.items()]
    slice = manifests.endpoint_slice("dns", "IPv4", entries, [{"port": 53, "protocol": "UDP"}])
    harness.send(changed(Kind.ENDPOINT_SLICE, slice))
    silent(harness, "node-2")
    assert "default/dns/UDP" in harness.status.set_aside


def test_why_nodes_are_not_probed_is_said(harness: Harness) -> None:
    harness.node_watch.error = "[Errno 98] Address already in use"
    harness.send()
    assert harness.status.node_health_error == harness.node_watch.error


def test_without_a_key_a_service_gets_the_default_and_an_event(tmp_path: Path) -> None:
    made = Harness(tmp_path)
    made.start()
    wants = service("web", "10.96.0.1", {HEALTH_ANNOTATION: HEALTH_NODES})
    made.send(*lists(wants, "10.1.0.1"))
    [warning] = made.annotations
    assert warning.reason.endswith("this node has no --node-health-key, so it is off")
    assert made.node_watch.wanted is None
    made.stop()


def test_the_key_is_read_and_too_short_a_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    options = Options(Paths(), "node-1", tmp_path)
    assert read_key(options) is None
    with pytest.raises(ConfigurationError, match="needs --node-health-key"):
        read_key(replace(options, endpoint_health=HEALTH_NODES))
    with pytest.raises(ConfigurationError, match="not a regular file"):
        read_key(replace(options, node_health_key=tmp_path))
    options = replace(options, node_health_key=path)
    with pytest.raises(ConfigurationError, match="No such file"):
        read_key(options)
    path.write_text("x" * 15 + "\n")
    with pytest.raises(ConfigurationError, match="less than 16 bytes"):
        read_key(options)
    path.write_text("x" * 16 + "\n")
    assert read_key(options) == b"x" * 16
