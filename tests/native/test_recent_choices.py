# SPDX-License-Identifier: Apache-2.0
"""The remembered choice of a tuple is valid for that tuple only, for a while, and while the backend
serves.
"""

from ipaddress import ip_address

import pytest

from ebpflb.entries.flows import Tuple
from ebpflb.entries.services import NO_SLOT, Chosen
from ebpflb.kernel.maps import records
from tests.native.kernel import NS_PER_JIFFY
from tests.native.node import POD, NativeNode

WEB, DNS = "10.1.0.1:8080", "10.1.0.2:53"
CLIENT, OTHER, FRONTEND = map(ip_address, ("10.1.0.9", "10.1.0.8", "172.30.0.1"))
SEGMENT = Tuple(CLIENT, FRONTEND, 40_000, 80, 6, 1)
DATAGRAM = SEGMENT._replace(protocol=17)
TUPLE = records.record("struct tuple")
UNKNOWN, NOTHING = -1, 0
EPOCH = {SEGMENT: 8192 * NS_PER_JIFFY, DATAGRAM: 256 * NS_PER_JIFFY}

both = pytest.mark.parametrize("packet", [SEGMENT, DATAGRAM], ids=["tcp", "udp"])


@pytest.fixture
def node(node: NativeNode) -> NativeNode:
    """Return a node with two Services with a backend each, at the beginning of an epoch."""
    node.publish(1, {}, cluster=[WEB])
    node.publish(2, {}, cluster=[DNS])
    node.kernel.now = 1000 * EPOCH[SEGMENT]
    return node


def remember(node: NativeNode, packet: Tuple, service: int, backend: str) -> int:
    chosen = Chosen.PREFIX | node.backend_id(service, backend)
    node.kernel.run("remember_choice", TUPLE.pack(packet), service, chosen, netns=POD)
    return chosen


def repeated(node: NativeNode, packet: Tuple) -> int:
    found: int = node.kernel.run("repeat_choice", TUPLE.pack(packet), netns=POD)
    return found


@both
def test_only_its_own_tuple(node: NativeNode, packet: Tuple) -> None:
    """The choice is repeated for packets of the same tuple; other tuples are unknown."""
    chosen = remember(node, packet, 1, WEB)
    assert repeated(node, packet) == chosen
    for other in (
        packet._replace(source=OTHER),
        packet._replace(source_port=40_001),
        packet._replace(destination_port=81),
        packet._replace(protocol=132),
    ):
        assert repeated(node, other) == UNKNOWN


@both
def test_the_choice_of_no_endpoint_is_repeated(node: NativeNode, packet: Tuple) -> None:
    """The decision that a packet gets no endpoint is repeated too."""
    node.kernel.run("remember_choice", TUPLE.pack(packet), 0, 0, netns=POD)
    assert repeated(node, packet) == NOTHING


@both
@pytest.mark.parametrize("becomes", ["gone", "another's", "another service's"])
def test_its_backend(node: NativeNode, packet: Tuple, becomes: str) -> None:
    """The remembered choice ends when the backend is removed, even if another backend has its
    id.
    """
    remember(node, packet, 1, WEB)
    id = node.backend_id(1, WEB)
    slot = node.kernel.get("backend_slots", node.backend_id(2, DNS))
    if becomes == "gone":
        node.put("backend_slots", id, NO_SLOT)
    elif becomes == "another's":
        own = node.kernel.get("backend_slots", id)
        node.put("slots", own, node.kernel.get("slots", own)._replace(id=id + 100))
    else:
        node.put("slots", slot, node.kernel.get("slots", slot)._replace(id=id))
        node.put("backend_slots", id, slot)
    assert repeated(node, packet) == UNKNOWN


@both
def test_two_cpus_write_at_once(node: NativeNode, packet: Tuple) -> None:
    """A place that holds halves of two CPUs' writes matches no tuple."""
    remember(node, packet, 1, WEB)
    ((place, one),) = node.kernel.items("recent_choices").items()
    remember(node, packet._replace(source=OTHER), 2, DNS)
    entries = node.kernel.items("recent_choices")
    (other,) = (entry for at, entry in entries.items() if at != place)
    for torn in (one._replace(choice=other.choice), one._replace(name=other.name)):
        node.put("recent_choices", place, torn)
        assert repeated(node, packet) == UNKNOWN


def test_segments_are_remembered_while_they_come(node: NativeNode) -> None:
    """One segment in each epoch is enough; after an epoch without a segment the choice is
    forgotten.
    """
    chosen = remember(node, SEGMENT, 1, WEB)
    for _ in range(3):
        node.kernel.now += EPOCH[SEGMENT]
        assert repeated(node, SEGMENT) == chosen
    node.kernel.now += 2 * EPOCH[SEGMENT]
    assert repeated(node, SEGMENT) == UNKNOWN


def test_datagrams_are_asked_for_again(node: NativeNode) -> None:
    """In each epoch, and after frontends have moved, `udp_choices` is read again."""
    chosen = remember(node, DATAGRAM, 1, WEB)
    node.kernel.now += EPOCH[DATAGRAM] - 1
    assert repeated(node, DATAGRAM) == chosen
    node.kernel.now += 1
    assert repeated(node, DATAGRAM) == UNKNOWN
    remember(node, DATAGRAM, 1, WEB)
    settings = node.kernel.get("settings", 0)
    node.put("settings", 0, settings._replace(frontend_moves=settings.frontend_moves + 1))
    assert repeated(node, DATAGRAM) == UNKNOWN
