# SPDX-License-Identifier: Apache-2.0
"""Direct and copied reads of headers give the same result.

Headers are read in place and written at once, or else by a call for each; a packet whose tuple
suffices is read no further. The same random packets go through two nodes: one has the usual
programs, the other only the calls and the whole path (-DWHOLE_WAY).
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpflb.kernel.programs import compiler
from tests.kit import once
from tests.load import scaled
from tests.packet.conftest import Loaded, loaded
from tests.packet.frames import TRANSPORTS, Raw, at, carrier, stacked
from tests.packet.node import PacketNode
from tests.packet.places import V4, V6, Places

ROUNDS, PACKETS = scaled(40), 25
DRAWN = {"port_changed", "masqueraded"}
_PORTS = (80, 8080, 50123, 30080, 1, 65535)


@pytest.fixture(scope="module")
def whole_way(shared: Path, cache: Path) -> Iterator[Loaded]:
    with once.alone(shared):
        compiled = compiler.compile_source("hooks/packet.c", ("-DWHOLE_WAY",), cache=cache)
    with loaded(compiled) as found:
        yield found


@pytest.fixture
def nodes(node: PacketNode, whole_way: Loaded, devices: dict[str, int]) -> list[PacketNode]:
    return [node, PacketNode(*whole_way, devices)]


def published(node: PacketNode, places: Places) -> None:
    """Publish services without random choice: otherwise the two nodes would differ by chance."""
    for number, protocol in enumerate(TRANSPORTS, start=1):
        node.publish(
            number,
            [f"{at(places.cluster_ip, 80)}/{protocol}"],
            cluster=[at(places.there, 65535 if protocol == "tcp" else 8080)],
        )


def some_packet(dice: random.Random, places: Places) -> bytes:
    """Draw a packet of any protocol, sometimes with options, in fragments or cut short."""
    protocol = dice.choice(list(TRANSPORTS))
    hosts = [places.pod, places.remote_pod, places.cluster_ip, places.there, places.unallocated]
    source, destination = dice.choice(hosts), dice.choice([*hosts, *[places.cluster_ip] * 3])
    ports: dict[str, Any] = {
        "sport": dice.choice(_PORTS),
        "dport": dice.choice([*_PORTS, 80, 80, 80]),
    }
    flags: dict[str, Any] = (
        {"flags": dice.choice(["S", "A", "SA", "FA", "R"])} if protocol == "tcp" else {}
    )
    frame = stacked(
        carrier(source, destination, **_unusual(dice, places)),
        TRANSPORTS[protocol](**ports, **flags, **_checksum(dice)),
        Raw(b"question"),
    )
    whole = bytes(frame)
    return (
        whole[: dice.randrange(14 + (40 if ":" in source else 20), len(whole))]
        if dice.random() < 0.2
        else whole
    )


def _unusual(dice: random.Random, places: Places) -> dict[str, Any]:
    if ":" in places.pod or dice.random() < 0.6:
        return {}
    fragment = {"flags": dice.choice(["MF", "DF"]), "frag": dice.choice([0, 0, 3]), "id": 7}
    return dice.choice([fragment, {"options": b"\x01" * 4}, _checksum(dice)])


def _checksum(dice: random.Random) -> dict[str, Any]:
    """Return the correct checksum, none, or the checksum of a damaged packet."""
    return dice.choice([{}, {}, {}, {"chksum": 0}, {"chksum": dice.randrange(1 << 16)}])


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_one_result(nodes: list[PacketNode], seed: int) -> None:
    """Each packet leaves both nodes unchanged or changed alike, with the same verdicts, at both
    hooks.
    """
    dice = random.Random(seed)
    places = dice.choice([V4, V6])
    chosen = dice.random() < 0.5
    former: list[bytes] = []
    for each in nodes:
        if chosen:
            each.settings("detect_local", "netfilter")
            each.put("flow_gate", 0, (0, 1, 0))
        published(each, places)
    for number in range(PACKETS):
        again = former and dice.random() < 0.5
        packet = dice.choice(former) if again else some_packet(dice, places)
        former.append(packet)
        hook = dice.choice(["ingress", "ingress", "egress"])
        one, other = (getattr(each, hook)(packet) for each in nodes)
        if DRAWN & one.verdicts.keys() and one.verdicts == other.verdicts:
            return  # a port that each node draws
        assert one == other, (seed, number, hook, packet.hex())
        assert nodes[0].priority == nodes[1].priority, (seed, number, hook, packet.hex())
