# SPDX-License-Identifier: Apache-2.0
"""With --fast-forward answered flows are translated twice at ingress, and redirected.

The result equals that of ingress, the stack and egress of the usual programs, which read the same
maps.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.compiler import Compiled
from tests.kit import once
from tests.packet import wire
from tests.packet.conftest import SCHED_CLS, Loaded, loaded
from tests.packet.frames import (
    ROUTER,
    Packet,
    at,
    built,
    datagram,
    destination,
    forwarded,
    network,
    opening,
    reply,
    segment,
    source,
    with_hops,
)
from tests.packet.network import mtu
from tests.packet.node import Outcome, PacketNode
from tests.packet.places import V4, V6, Places
from tests.packet.services import serve

TRIES = 3  # one packet in 8.6 s of each entry goes to the stack

protocols = pytest.mark.parametrize("protocol", ["tcp", "udp"])
targets = pytest.mark.parametrize("target", ["here", "there"])


class TwoVariants(NamedTuple):
    """A node with either variant of the programs, and the same maps."""

    fast: PacketNode
    usual: PacketNode


@pytest.fixture(scope="module")
def programs(shared: Path, cache: Path, compiled: Compiled) -> Iterator[tuple[Loaded, Loaded]]:
    with once.alone(shared):
        ours = compiler.compile_source("hooks/packet.c", ("-DFAST_FORWARD",), cache=cache)
    with ExitStack() as opened:
        maps, hooks = opened.enter_context(loaded(ours))
        fds = {compiler.MAP_NUMBERS[name]: table.fd for name, table in maps.items()}
        usual: dict[str, int] = {}
        for name, code in compiled.programs.items():
            usual[name] = loader.load_one(name, SCHED_CLS, loader.relocate(code, fds))
            opened.callback(os.close, usual[name])
        yield (maps, hooks), (maps, usual)


@pytest.fixture
def both(programs: tuple[Loaded, Loaded], devices: dict[str, int]) -> TwoVariants:
    """Neighbours are known."""
    commands = [
        *(f"neighbour replace {p.here} lladdr {ROUTER} dev pods nud permanent" for p in (V4, V6)),
        *(f"neighbour replace {p.router} lladdr {ROUTER} dev uplink" for p in (V4, V6)),
    ]
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)
    ours, usual = programs
    return TwoVariants(usual=PacketNode(*usual, devices), fast=PacketNode(*ours, devices))


class AnsweredFlow(NamedTuple):
    """An answered flow: a request as it comes in, and a reply; ``out``: the endpoint's device."""

    request: Packet
    reply: Packet
    out: str


def further(protocol: str, packet: Packet) -> Packet:
    """A later packet between the same ends as one that opened the flow, or answered it."""
    if protocol == "udp":
        return datagram(source(packet), destination(packet), b"more")
    is_answer = packet["TCP"].ack > 0
    numbers = {"seq": 5001, "ack": 1001} if is_answer else {"seq": 1001, "ack": 5001}
    return segment(source(packet), destination(packet), "A", **numbers)


def answered(both: TwoVariants, places: Places, protocol: str, target: str) -> AnsweredFlow:
    backend = [at(getattr(places, target), 8080)]
    here = backend if target == "here" else []
    where = serve(both.fast, places, "nodeport", protocol, cluster=backend, here=here)
    out = "pods" if target == "here" else "uplink"
    asked = opening(protocol, at(places.client, 50123), where)
    came = both.fast.through(asked, "uplink", out)
    answer = reply(came)
    both.fast.through(answer, out, "uplink")
    if protocol == "tcp":
        both.fast.through(further(protocol, asked), "uplink", out)
    return AnsweredFlow(further(protocol, asked), further(protocol, answer), out)


def run(node: PacketNode, packet: Packet, into: str, out: str) -> Outcome:
    """Return the packet's outcome at ingress, ignoring packets that only refresh conntrack."""
    for _ in range(TRIES):
        came = node.ingress(packet, into)
        if came.action == "redirect":
            break
        node.egress(forwarded(came.packet), out, into)
    return came


def same(both: TwoVariants, packet: Packet, into: str, out: str) -> None:
    came = run(both.fast, packet, into, out)
    assert came.action == "redirect"
    assert wire.faults(came.frame) <= wire.faults(bytes(packet))
    usual = both.usual.through(packet, into, out)
    assert bytes(network(came.packet)) == bytes(network(usual))


@protocols
@targets
def test_as_usual_programs(both: TwoVariants, places: Places, protocol: str, target: str) -> None:
    """Request and reply, masqueraded or not, get the same addresses, ports, checksums and hops."""
    flow = answered(both, places, protocol, target)
    for _ in range(2):
        same(both, flow.request, "uplink", flow.out)
        same(both, flow.reply, flow.out, "uplink")


@protocols
@targets
def test_entries_as_by_the_usual_programs(
    both: TwoVariants, places: Places, protocol: str, target: str
) -> None:
    """The entries contain the same flags and TCP numbers as with the usual programs."""
    flow = answered(both, places, protocol, target)

    def noted(node: PacketNode) -> list[tuple[object, ...]]:
        for packet, into, out in (
            (flow.request, "uplink", flow.out),
            (flow.reply, flow.out, "uplink"),
        ):
            run(node, packet, into, out)
        return sorted(
            (name, entry.flags, entry.end, entry.acknowledged)
            for name, entry in node.flows(protocol).items()
        )

    assert noted(both.fast) == noted(both.usual)


@protocols
@targets
@pytest.mark.parametrize("count", [0, 1])
def test_last_hop(
    both: TwoVariants, places: Places, protocol: str, target: str, count: int
) -> None:
    """A packet with its last hop is left to the stack, which tells the sender."""
    flow = answered(both, places, protocol, target)
    assert both.fast.ingress(with_hops(flow.request, count), "uplink").action == "pass"
    assert both.fast.ingress(with_hops(flow.reply, count), flow.out).action == "pass"


@targets
def test_too_long(both: TwoVariants, places: Places, target: str) -> None:
    """A packet longer than the route's MTU is left to the stack, in both directions."""
    flow = answered(both, places, "udp", target)
    request = datagram(source(flow.request), destination(flow.request), bytes(1300))
    answer = datagram(source(flow.reply), destination(flow.reply), bytes(1300))
    with mtu("uplink", 1280), mtu("pods", 1280):
        assert run(both.fast, request, "uplink", flow.out).action == "pass"
        assert run(both.fast, answer, flow.out, "uplink").action == "pass"
        assert run(both.fast, flow.request, "uplink", flow.out).action == "redirect"


@pytest.mark.parametrize("flags", ["FA", "R", "RA", "S", "SA"])
def test_ends(both: TwoVariants, places: Places, flags: str) -> None:
    """Segments that open or end a connection pass the stack, and conntrack."""
    flow = answered(both, places, "tcp", "here")
    for packet, into in ((flow.request, "uplink"), (flow.reply, "pods")):
        last = segment(source(packet), destination(packet), flags)
        assert both.fast.ingress(last, into).action != "redirect"


@protocols
def test_unanswered(both: TwoVariants, places: Places, protocol: str) -> None:
    """Requests pass the stack until the endpoint has answered."""
    where = serve(both.fast, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    asked = opening(protocol, at(places.client, 50123), where)
    both.fast.through(asked)
    for _ in range(TRIES):
        both.fast.through(further(protocol, asked))


@protocols
def test_frame_of_another_host(both: TwoVariants, places: Places, protocol: str) -> None:
    """A frame with another hardware address is left to the stack, which drops it, or bridges it."""
    flow = answered(both, places, protocol, "here")
    astray = flow.request.copy()
    astray.dst = "02:00:00:00:00:77"
    assert run(both.fast, built(astray), "uplink", "pods").action == "pass"


@protocols
def test_without_a_neighbour(both: TwoVariants, places: Places, protocol: str) -> None:
    """The stack asks for the next hop's hardware address."""
    flow = answered(both, places, protocol, "here")
    subprocess.run(["ip", "neighbour", "del", places.here, "dev", "pods"], check=True)
    assert run(both.fast, flow.request, "uplink", "pods").action == "pass"


@protocols
def test_endpoint_removed(both: TwoVariants, places: Places, protocol: str) -> None:
    """Connections go on past the stack; datagrams get another endpoint, as without the option."""
    flow = answered(both, places, protocol, "here")
    serve(both.fast, places, "nodeport", protocol, cluster=[at(places.there, 9090)])
    came = run(both.fast, flow.request, "uplink", "pods")
    assert came.action == ("redirect" if protocol == "tcp" else "pass")
