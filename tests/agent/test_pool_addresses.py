# SPDX-License-Identifier: Apache-2.0
"""What the loop collects for the load balancer addresses: Nodes, Services, where endpoints are."""

from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import msgspec
import pytest

from ebpflb.agent.loop import Turn
from ebpflb.agent.pool_addresses import GATHERING, SHARE, PoolAddresses, View
from ebpflb.kernel.node.device_watch import DevicesChanged
from ebpflb.lab import manifests
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.devices import Device
from ebpflb.model.events import Changed, Key, Kind, ReadObject, Removed, Replaced
from ebpflb.model.nodes import EXCLUDED_LABEL
from ebpflb.model.objects import EndpointSlice, Node, Object, Service
from ebpflb.model.pools import CLASS, parse_pools

POOLS = parse_pools(("192.0.2.200-192.0.2.250",))
FIRST = ip_address("192.0.2.200")
WEB = Key("default", "web")
OWN = (ip_address("192.0.2.1"),)
UPLINK = Device(2, "eth0", False, True, 0, OWN, OWN, mac="02:00:00:00:00:01")


class Loop:
    """The part, the cluster's state that is told the same before, and a clock."""

    device_list = DevicesChanged((UPLINK,))

    def __init__(self) -> None:
        self.now, self.shown = 100.0, list[View]()
        self.took = 0.0  # seconds, for each view
        self.cluster = ClusterState("one")
        here: Any = self
        self.part = PoolAddresses(POOLS, self.cluster, here, self.show, lambda: self.now)
        for kind in Kind:
            self.say(Replaced(kind, {}))
        self.node("one", OWN[0])
        self.turn()

    def show(self, view: View) -> None:
        self.shown.append(view)
        self.now += self.took

    def say(self, event: Any) -> None:
        applied = self.cluster.apply(event)
        self.part.take(event)
        self.part.observe(Turn(applied=[(event, applied)]))

    def put(self, kind: type[Object], made: Any) -> None:
        found = msgspec.convert(made, kind)
        key = Key(found.metadata.namespace, found.metadata.name)
        self.say(Changed(Kind(kind.__name__), key, ReadObject(found, "a test")))

    def node(self, name: str, address: object, *, ready: str = "True", **labels: str) -> None:
        made = manifests.node(name, str(address), labels=labels or None)
        made["status"]["conditions"] = [{"type": "Ready", "status": ready}]
        self.put(Node, made)

    def web(self, *held: str, **spec: Any) -> None:
        kind = {"type": "LoadBalancer", "loadBalancerClass": CLASS, **spec}
        ports = [{"port": 80, "name": "http"}]
        self.put(Service, manifests.service("web", ["10.0.0.1"], ports, ingress=held, **kind))

    def endpoints(self, **nodes: bool) -> None:
        found = [
            manifests.endpoint(f"10.1.0.{number}", node=name, target=name, ready=is_ready)
            for number, (name, is_ready) in enumerate(nodes.items(), 1)
        ]
        ports = [{"port": 8080, "name": "http"}]
        self.put(EndpointSlice, manifests.endpoint_slice("web", "IPv4", found, ports))

    def turn(self) -> View:
        """The view after what was said."""
        self.now += 10
        assert self.part.due <= self.now, "nothing has changed"
        self.part.turn()
        return self.shown[-1]


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_nodes_and_the_uplink(loop: Loop) -> None:
    """All Nodes; those that are not ready, or are excluded, own nothing."""
    loop.node("two", "192.0.2.2", ready="Unknown")
    loop.node("three", "192.0.2.3", **{EXCLUDED_LABEL: ""})
    view = loop.turn()
    assert view.nodes.keys() == {"one", "two", "three"}
    assert view.ready == {"one", "three"} and view.eligible == {"one"}
    assert view.devices == {4: UPLINK}
    assert view.barred(ip_address("192.0.2.2")) == "is an address of a node"
    assert view.barred(FIRST) == ""
    loop.say(Removed(Kind.NODE, Key("", "two")))
    assert "two" not in loop.turn().nodes


def test_services_with_addresses_of_the_pool(loop: Loop) -> None:
    """Others than those of our class, and addresses of no pool or of a node, do not count."""
    loop.web(str(FIRST), "10.9.9.9")
    assert loop.turn().wanted == {FIRST: frozenset()}
    loop.web(str(OWN[0]))
    assert loop.turn().wanted == {}
    loop.web(str(FIRST), loadBalancerClass="other/class")
    assert loop.turn().claims == ()


def test_policy_local_prefers_nodes_with_ready_endpoints(loop: Loop) -> None:
    loop.web(str(FIRST), externalTrafficPolicy="Local")
    loop.turn()
    loop.endpoints(two=True, three=False)
    assert loop.turn().wanted == {FIRST: {"two"}}
    loop.endpoints(two=False, three=True)
    assert loop.turn().wanted == {FIRST: {"three"}}


@pytest.mark.parametrize("say", [Loop.web, lambda loop: loop.node("one", OWN[0])])
def test_what_is_no_news_makes_no_work(loop: Loop, say: Callable[[Loop], None]) -> None:
    """Nor do other Services."""
    say(loop)
    loop.turn() if loop.part.due < 1e9 else None
    say(loop)
    made = manifests.service("other", ["10.0.0.2"], [{"port": 80}])
    loop.put(Service, made)
    assert loop.part.due == float("inf")


def test_the_loop_has_its_time_for_others_whatever_a_tenant_writes(loop: Loop) -> None:
    """A view that took a second is made again ten seconds later."""
    loop.took = 1.0
    loop.web()
    begun = loop.now + 10
    loop.turn()
    loop.web(str(FIRST))
    assert loop.part.due == begun + SHARE * loop.took
    loop.took = 0.0
    loop.turn()
    loop.web()
    assert loop.part.due == loop.now + GATHERING
