# SPDX-License-Identifier: Apache-2.0
"""A packet whose entry was given to another flow meanwhile is dropped, never sent elsewhere."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ebpflb.entries.flows import Hook
from ebpflb.kernel import bpf
from ebpflb.kernel.maps.layout import MAPS
from ebpflb.kernel.programs import loader
from ebpflb.kernel.programs.compiler import Compiled
from tests.packet.conftest import loaded
from tests.packet.frames import Ether, at, datagram, destination, ends, opening, reply
from tests.packet.network import routed_from
from tests.packet.node import Outcome, PacketNode
from tests.packet.places import V4, Places
from tests.packet.services import serve

CLIENTS, ROUNDS = 150, 20


@pytest.fixture
def where(node: PacketNode, places: Places, kind: str, protocol: str) -> str:
    return serve(node, places, kind, protocol, cluster=[at(places.there, 8080)])


def exchange(node: PacketNode, table: str) -> None:
    """Every entry of one hook contains what another one of that hook did, its check included."""
    flows = node.maps[table]
    entries = list(flows.packed_items())
    for hook in Hook:
        found = [pair for pair in entries if flows.key.unpack(pair[0]).hook == hook]
        values = [value for _, value in found]
        for (key, _), value in zip(found, [*values[1:], *values[:1]], strict=True):
            bpf.map_update(flows.fd, key, value)


def dropped(outcome: Outcome) -> bool:
    return outcome.action == "drop" and outcome.verdicts == {"recycled": 1}


def test_entries_of_others_are_not_believed(
    node: PacketNode, places: Places, client: str, where: str, protocol: str
) -> None:
    """A packet of the client is dropped at ingress, and one of the backend where it is known."""
    asked = node.through(opening(protocol, client, where))
    node.through(opening(protocol, at(places.client, 50999), where))
    answer = reply(asked)
    assert ends(node.through(answer)) == f"{where} > {client}"
    exchange(node, "tcp_flows" if protocol == "tcp" else "other_flows")
    assert dropped(node.ingress(opening(protocol, client, where)))
    came = node.ingress(answer)
    assert dropped(came) or dropped(node.egress(came.packet))


@pytest.fixture
def crowded(compiled: Compiled, devices: dict[str, int]) -> Iterator[PacketNode]:
    """A node with such small flow tables that entries are evicted all the time."""
    small = {name: MAPS[name]._replace(entries=64) for name in ("tcp_flows", "other_flows")}
    with loaded(compiled, **small) as found:
        yield PacketNode(*found, devices)


def test_eviction_at_full_speed_translates_nothing_wrong(crowded: PacketNode) -> None:
    """Two threads open and follow flows through a table that is much too small for them."""
    backends = [at(V4.there, 8080), at(V4.elsewhere, 8080)]
    frontends = [at(V4.cluster_ip, port) for port in (80, 81)]
    for service in (1, 2):
        text = f"{frontends[service - 1]}/udp"
        crowded.publish(service, [text], cluster=[backends[service - 1]])

    def ask(way: int) -> set[str]:
        """Return the destinations of the datagrams of one thread's clients."""
        clients = [at(V4.pod, 20_000 + 2 * number + way) for number in range(CLIENTS)]
        frames = [bytes(datagram(client, frontends[way])) for client in clients] * ROUNDS
        ifindex = crowded.devices["uplink"]
        ran = [
            loader.run_program(crowded.hooks["ingress"], each, ifindex=ifindex) for each in frames
        ]
        passed = {each.packet for each in ran if each.retval == loader.PASS}
        return {destination(Ether(packet)) for packet in passed}

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(ask, (0, 1))) == [{backends[0]}, {backends[1]}]
    assert crowded.flow_counters("udp")[0] > 64


def test_a_reply_is_not_redirected_by_the_entry_of_another(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """With --reply-path=request-device a reply whose entry is another flow's is dropped at egress.

    Nothing is noted in the entries.
    """
    node.settings("detect_local", "reply_to_device")
    backend, where = [at(places.here, 8080)], at(places.node, 30080)
    serve(node, places, "nodeport", protocol, cluster=backend, here=backend)
    for port in (50123, 50124):
        asked = node.through(opening(protocol, at(places.client, port), where), "uplink", "pods")
    exchange(node, "tcp_flows" if protocol == "tcp" else "other_flows")
    before = dict(node.maps["tcp_flows" if protocol == "tcp" else "other_flows"].packed_items())
    with routed_from(places.here, "tunnel"):
        came = node.ingress(reply(asked), "pods")
    assert (came.action, came.frame) == ("pass", bytes(reply(asked)))
    assert dropped(node.egress(came.packet, "tunnel", "pods"))
    after = dict(node.maps["tcp_flows" if protocol == "tcp" else "other_flows"].packed_items())
    assert after == before
