# SPDX-License-Identifier: Apache-2.0
"""Session affinity: which clients share it, how long it lasts, and when it ends early."""

from collections.abc import Callable
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.entries.services import ServiceEntry
from ebpflb.kernel.maps.records import Affinity, AffinityKey
from tests.native.node import HOST, OTHER_POD, POD, SECOND, NativeNode
from tests.publishing import frontend

SERVICE = "172.30.0.1:80"
MANY = [f"10.1.0.{n}:8080" for n in range(1, 101)]
MONTH = 86_400 * 30


def goes(node: NativeNode, *, netns: int = POD, to: str = SERVICE) -> str:
    return node.socket(netns=netns).connect(to).place


def test_shared_by_all_frontends(node: NativeNode) -> None:
    """Affinity belongs to the service port: its addresses and NodePort share it."""
    node.owns("192.0.2.1")
    others = {"203.0.113.1:80": "external", "0.0.0.0:30080": "external"}
    node.publish(1, {SERVICE: "", **others}, cluster=MANY, affinity=60)
    places = ("203.0.113.1:80", "192.0.2.1:30080", SERVICE)
    assert {goes(node, to=to) for to in places} == {goes(node)}


def test_services_are_separate(node: NativeNode) -> None:
    """A client's affinity to one service does not count for another."""
    for service in range(1, 20):
        node.publish(service, [f"172.30.0.{service}:80"], cluster=MANY, affinity=60)
    found = {goes(node, to=f"172.30.0.{service}:80") for service in range(1, 20)}
    assert len(found) > 5
    assert len(node.kernel.items("affinity")) == 19


@pytest.mark.parametrize("seconds", [1, 10_800, MONTH, 86_400, 0xFFFFFFFF])
def test_affinity_is_valid_to_its_last_moment(node: NativeNode, seconds: int) -> None:
    """The affinity is valid until the timeout has passed, including its last moment."""
    node.publish(1, [SERVICE], cluster=MANY, affinity=seconds)
    home = goes(node)
    node.kernel.now += seconds * SECOND
    assert goes(node) == home
    node.kernel.now += seconds * SECOND + 1
    goes(node)
    assert node.kernel.get("service_stats", 1)[:2] == (3, 1)


def test_used_meanwhile_on_another_cpu(node: NativeNode) -> None:
    """A last use later than our reading of the clock counts as recent, not as long ago."""
    node.publish(1, [SERVICE], cluster=MANY, affinity=60)
    home = goes(node)
    number = node.backend_id(1, home)
    client = AffinityKey(POD, ip_address("::"), 1)
    node.kernel.put("affinity", client, Affinity(node.kernel.now + 1, number))
    assert goes(node) == home
    assert node.kernel.get("service_stats", 1).by_affinity == 1


def test_list_in_use(node: NativeNode) -> None:
    """The remembered backend must be in the list that this frontend's policy allows."""
    frontends = {SERVICE: "local", "203.0.113.1:80": "external local"}
    node.publish(1, frontends, cluster=["10.2.0.1:80"], local=["10.1.0.1:80"], affinity=60)
    for _ in range(2):
        assert goes(node, to="203.0.113.1:80") == "10.2.0.1:80"
        assert goes(node) == "10.1.0.1:80"


def test_backend_of_another_service(node: NativeNode) -> None:
    """A remembered id whose slot now belongs to another service is not used."""
    node.publish(1, [SERVICE], cluster=MANY, affinity=60)
    home = goes(node)
    number = node.backend_id(1, home)
    node.publish(2, ["172.30.0.2:80"], cluster=["10.9.0.1:80"])
    slot = node.kernel.get("backend_slots", node.backend_id(2, "10.9.0.1:80"))
    node.kernel.put("backend_slots", number, slot)
    assert goes(node) in MANY
    assert node.kernel.get("service_stats", 1).by_affinity == 0


def test_off_and_on(node: NativeNode) -> None:
    """Affinity takes effect at once when it is switched on, and ends at once when switched off."""
    node.publish(1, [SERVICE], cluster=MANY, affinity=60)
    goes(node)
    node.publish(1, [SERVICE], cluster=MANY, affinity=0)
    assert len({goes(node) for _ in range(20)}) > 5
    node.publish(1, [SERVICE], cluster=MANY, affinity=60)
    assert len({goes(node) for _ in range(20)}) == 1


@given(
    steps=some.lists(some.tuples(some.sampled_from([HOST, POD, OTHER_POD]), some.integers(0, 9)))
)
def test_any_pace(new_node: Callable[[], NativeNode], steps: list[tuple[int, int]]) -> None:
    """A client changes its backend if and only if a pause exceeds the timeout."""
    node = new_node()
    node.publish(1, [SERVICE], cluster=MANY, affinity=5)
    service: ServiceEntry = node.kernel.get("services", frontend(SERVICE))
    assert service.affinity_seconds == 5
    last: dict[int, tuple[int, str]] = {}
    by_affinity = 0
    for netns, pause in steps:
        node.kernel.now += pause * SECOND
        place = goes(node, netns=netns)
        if netns in last and node.kernel.now - last[netns][0] <= 5 * SECOND:
            assert place == last[netns][1]
            by_affinity += 1
        last[netns] = (node.kernel.now, place)
    assert node.kernel.get("service_stats", 1)[:2] == (len(steps), by_affinity)
