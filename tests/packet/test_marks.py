# SPDX-License-Identifier: Apache-2.0
"""--packet-mark, and the source ranges of NodePorts, packet by packet."""

from typing import Any

import pytest

from ebpflb.kernel.programs import loader
from tests.packet.frames import Packet, at, forwarded, opening, reply
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve

MARK, MASK = 0x4000, 0xC000


def mark_after(node: PacketNode, hook: str, packet: Packet, device: str, mark: int = 0) -> int:
    """Return the packet's mark after a program has run; the mark was ``mark`` before."""
    return loader.run_program(
        node.hooks[hook], bytes(packet), ifindex=node.devices[device], mark=mark
    ).mark


@pytest.mark.parametrize("before", [0, 0x8001, 0xFFFFFFFF])
def test_translated_packets_are_marked(
    node: PacketNode, places: Places, protocol: str, before: int
) -> None:
    """At ingress, new and known flows and translated replies are marked; other bits stay."""
    after = before & ~MASK | MARK
    node.settings("detect_local", mark=MARK, mark_mask=MASK)
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    request = opening(protocol, at(places.client, 50123), where)
    assert mark_after(node, "ingress", request, "uplink", before) == after
    assert mark_after(node, "ingress", request, "uplink", before) == after
    masqueraded = node.through(request)
    answer = reply(masqueraded)
    assert mark_after(node, "ingress", answer, "uplink", before) == after
    sent_on = forwarded(node.ingress(request).packet)
    assert mark_after(node, "egress", sent_on, "uplink", before) == before


def test_other_packets_are_not_marked(node: PacketNode, places: Places, protocol: str) -> None:
    """An ignored packet keeps its mark; without the option every packet does."""
    node.settings("detect_local", mark=MARK, mark_mask=MASK)
    direct = opening(protocol, at(places.client, 50123), at(places.there, 8080))
    assert mark_after(node, "ingress", direct, "uplink", 7) == 7
    node.settings("detect_local")
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    request = opening(protocol, at(places.client, 50123), where)
    assert mark_after(node, "ingress", request, "uplink", 7) == 7


def test_nodeport_source_ranges(node: PacketNode, places: Places, protocol: str) -> None:
    """A restricted NodePort admits clients in its own ranges, whatever the VIPs' ranges are."""
    lists: dict[str, Any] = {"cluster": [at(places.there, 8080)]}
    where = serve(node, places, "nodeport", protocol, "restricted", **lists)
    node.admit(1, places.clients)
    request = opening(protocol, at(places.client, 50123), where)
    denied = node.ingress(request)
    assert (denied.action, denied.verdicts) == ("drop", {"source_denied": 1})
    node.admit(1, places.clients, nodeport=1)
    assert node.ingress(request).verdicts == {"translated": 1}
    pod = opening(protocol, at(places.pod, 50123), where)
    assert node.ingress(pod, "pods").verdicts == {"source_denied": 1}


def test_services_apart(node: PacketNode, places: Places, protocol: str) -> None:
    """The ranges of one service do not count for another."""
    serve(node, places, "balancer", protocol, "restricted", cluster=[at(places.there, 8080)])
    node.admit(1, places.clients)
    words = {f"{at(places.external, 443)}/{protocol}": "external load_balancer restricted"}
    node.publish(2, words, cluster=[at(places.there, 8080)])
    request = opening(protocol, at(places.client, 50123), at(places.external, 443))
    assert node.ingress(request).verdicts == {"source_denied": 1}
    node.admit(2, f"{places.client}/{32 if places.version == 4 else 128}")
    assert node.ingress(request).verdicts == {"translated": 1}
    neighbour = opening(protocol, at(f"{places.client[:-1]}8", 50123), at(places.external, 443))
    assert node.ingress(neighbour).verdicts == {"source_denied": 1}
