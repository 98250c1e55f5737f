# SPDX-License-Identifier: Apache-2.0
"""Every outcome is counted once, by verdict, by service and by backend."""

import pytest

from ebpflb.entries.services import FIRST_BACKENDS
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.records import ServiceCounters
from tests.native.copies import copy_entry
from tests.native.node import HOST, NativeNode

WEB, DNS, EMPTY, AWAY = "172.30.0.1:80", "172.30.0.10:53", "172.30.0.2:80", "172.30.0.3:80"
ONE, TWO = "10.1.0.1:8080", "10.1.0.2:53"


@pytest.fixture
def busy(node: NativeNode) -> NativeNode:
    """Return a node where every kind of event has happened once."""
    node.owns("192.0.2.1")
    node.publish(1, {WEB: "", "0.0.0.0:30080": "external"}, cluster=[ONE])
    node.publish(2, [f"{DNS}/udp"], cluster=[TWO], affinity=60)
    node.publish(3, [EMPTY])
    node.publish(4, {AWAY: "local"}, cluster=["10.2.0.1:80"])
    web, dns = node.socket(), node.socket("udp")
    web.connect(WEB)
    web.getpeername(ONE)
    for _ in range(3):
        dns.sendmsg(DNS)
    node.socket("udp").sendmsg(DNS)
    node.socket().connect(EMPTY)
    node.socket().connect(AWAY)
    node.socket().connect("192.0.2.9:80")
    node.socket(netns=HOST).bind("0.0.0.0:30080")
    return node


def test_each_hook_call_has_one_verdict(busy: NativeNode) -> None:
    """Each hook call ends in one verdict; a bind is counted only if it failed, a reply only if its
    address was restored.
    """
    expected = {
        "translated": 5,
        "reply_translated": 1,
        "refused": 1,
        "no_local_endpoint": 1,
        "passed": 1,
    }
    denied = {"nodeport_bind_denied": 1} if busy.kernel.names_errno else {}
    assert busy.counted() == expected | denied


@pytest.mark.parametrize(
    ("service", "counters"),
    [
        (1, ServiceCounters(1, 0, 0, 0)),
        (2, ServiceCounters(2, 1, 0, 0)),
        (3, ServiceCounters(0, 0, 1, 0)),
        (4, ServiceCounters(0, 0, 0, 1)),
    ],
)
def test_a_service_counts_flows_and_refusals(
    busy: NativeNode, service: int, counters: ServiceCounters
) -> None:
    """A service counts flows, not datagrams, and the reasons for having no backend."""
    assert busy.kernel.get("service_stats", service) == counters


def test_every_verdict_has_a_counter() -> None:
    """The map of verdicts is as long as the list of verdicts."""
    assert list(layout.VERDICTS) == list(range(layout.MAPS["verdicts"].entries))


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_ids_beyond_the_counters(node: NativeNode, protocol: str) -> None:
    """A service or backend beyond the counters is served, but not counted.

    A slot names its service by 16 bits, and there are counters for all such ids.
    """
    service, backend = layout.MAPS["service_stats"].entries, layout.MAPS["backend_stats"].entries
    node.publish(service - 1, [f"{WEB}/{protocol}"], cluster=[ONE])
    node.publish(service, [f"{EMPTY}/{protocol}"])
    node.kernel.put("slots", 0, node.kernel.get("slots", 0)._replace(id=backend))
    socket = node.socket(protocol)
    assert socket.connect(WEB).place == ONE
    socket.release()
    node.socket(protocol).connect(EMPTY)
    assert node.counted() == {"translated": 1, "refused": 1}


@pytest.mark.parametrize(("cpu", "part"), [(0, 0), (31, 31), (32, 0), (239, 15)])
def test_each_cpu_counts_in_its_own_part(node: NativeNode, cpu: int, part: int) -> None:
    """Each CPU counts in its own part; CPUs beyond the last part share the parts."""
    node.publish(1, [WEB], cluster=[ONE])
    node.kernel.cpu = cpu
    node.socket().connect(WEB)
    entries = layout.MAPS["service_stats"].entries
    assert node.kernel.get("service_stats", part * entries + 1).chosen == 1


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_counters_are_loaded_beside_the_slot(node: NativeNode, protocol: str) -> None:
    """A program prefetches the counters of the drawn backend before it reads the slot."""
    places = [f"10.1.0.{n}:8080" for n in range(1, FIRST_BACKENDS + 2)]
    node.publish(1, [f"{WEB}/{protocol}"], cluster=places)
    copy_entry(node, f"{WEB}/{protocol}")
    counters, asked = node.kernel.tables["backend_stats"], list[set[bytes]]()
    for _ in range(100):
        counters.places.clear()
        node.kernel.meanwhile["slots"].append(lambda: asked.append({*counters.places}))
        chosen = node.socket(protocol).connect(WEB).place
        named = [node.backend_id(1, chosen)] if chosen != places[-1] else []
        assert asked.pop() == {*map(counters.key.pack, named)}
