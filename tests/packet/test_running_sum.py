# SPDX-License-Identifier: Apache-2.0
"""A device's sum of the whole packet (CHECKSUM_COMPLETE) stays right after a rewrite.

The stack compares this sum with checksums later, and treats a packet with a wrong sum as damaged.
"""

import pytest

from ebpflb.errors import KernelError
from tests.packet.errors import KINDS, error
from tests.packet.frames import at, datagram, ends, fragments, opening, quoted, reply
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve


@pytest.fixture
def node(node: PacketNode) -> PacketNode:
    """Return a node whose devices compute sums; the kernel verifies them after each run (6.17)."""
    node.complete = True
    try:
        node.ingress(bytes(64))
    except KernelError:
        pytest.skip("this kernel cannot test it")
    return node


@pytest.mark.parametrize("port", [80, 8080])
@pytest.mark.parametrize("sender", ["pod", "client"])
def test_the_sum_is_right_both_ways(
    node: PacketNode, places: Places, protocol: str, sender: str, port: int
) -> None:
    """The sum is right in both directions, with and without masquerading, and with any port."""
    client = at(getattr(places, sender), 50123)
    where = serve(node, places, "cluster", protocol, cluster=[at(places.there, port)])
    asked = node.through(opening(protocol, client, where))
    assert ends(node.through(reply(asked))) == f"{where} > {client}"


@pytest.mark.parametrize("sender", ["pod", "client"])
def test_no_checksum(node: PacketNode, places: Places, sender: str) -> None:
    """Without a UDP checksum, the device's sum alone reflects the changed addresses."""
    client = at(getattr(places, sender), 50123)
    where = serve(node, places, "cluster", "udp", cluster=[at(places.there, 5353)])
    asked = node.through(datagram(client, where, chksum=0))
    assert ends(node.through(reply(asked))) == f"{where} > {client}"


def test_in_later_fragments_only_addresses_change(node: PacketNode, places: Places) -> None:
    client = at(places.client, 50123)
    where = serve(node, places, "cluster", "udp", cluster=[at(places.there, 5353)])
    for piece in fragments(client, where):
        assert node.through(piece)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_of_errors_is_right(
    node: PacketNode, places: Places, protocol: str, kind: str
) -> None:
    """The sum of ICMP errors is correct, both ways."""
    client = at(places.client, 50123)
    where = serve(node, places, "cluster", protocol, cluster=[at(places.there, 8080)])
    asked = node.through(opening(protocol, client, where))
    assert quoted(node.through(error(kind, places.there, asked))) == f"{client} > {where}"
    answer = node.through(reply(asked))
    assert quoted(node.through(error(kind, places.client, answer))) == ends(reply(asked))
