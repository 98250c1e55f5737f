# SPDX-License-Identifier: Apache-2.0
"""With --fast-forward answered flows are translated twice at ingress, and redirected: from the 20th
packet of each direction on, to the next hop or into a pod of this node.

The result equals that of ingress, the stack and egress of the usual programs, which read the same
maps.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import pytest

from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.compiler import Compiled
from ebpflb.plan.entries import PodDevice
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
SEEN = 19  # packets of each direction that pass the stack
POD_MAC, HOST_MAC = "02:00:00:00:00:51", "02:00:00:00:00:52"

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
    both = TwoVariants(usual=PacketNode(*usual, devices), fast=PacketNode(*ours, devices))
    both.fast.settings("detect_local", "fast_forward")
    return both


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
    flow = AnsweredFlow(further(protocol, asked), further(protocol, answer), out)
    for _ in range(SEEN - 1):
        both.fast.through(flow.request, "uplink", out)
        both.fast.through(flow.reply, out, "uplink")
    return flow


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
def test_first_packets_pass_the_stack(
    both: TwoVariants, places: Places, protocol: str, target: str
) -> None:
    """The first 19 packets of each direction do (``answered``), and the 20th does not."""
    flow = answered(both, places, protocol, target)
    assert both.fast.ingress(flow.request, "uplink").action == "redirect"
    assert both.fast.ingress(flow.reply, flow.out).action == "redirect"


def into_pod(both: TwoVariants, places: Places, mtu: int = 1500) -> None:
    """Let the endpoint of this node be a pod behind the device ``pods``."""
    way = PodDevice(both.fast.devices["pods"], mtu, POD_MAC, HOST_MAC)
    both.fast.put("pod_devices", ip_address(places.here), way)


def goes_into_pod(came: Outcome) -> bool:
    return came.action == "redirect" and (came.packet.dst, came.packet.src) == (POD_MAC, HOST_MAC)


@protocols
def test_into_a_pod(both: TwoVariants, places: Places, protocol: str) -> None:
    """A request gets the pod's MAC address, is otherwise as by the usual programs, and loses what
    belongs to this node; its reply leaves as ever.
    """
    flow = answered(both, places, protocol, "here")
    into_pod(both, places)
    same(both, flow.request, "uplink", "pods")
    assert goes_into_pod(both.fast.ingress(flow.request, "uplink", priority=7))
    assert both.fast.priority == 0
    replied = run(both.fast, flow.reply, "pods", "uplink")
    assert replied.action == "redirect"
    assert not goes_into_pod(replied)


@protocols
def test_too_long_for_a_pod(both: TwoVariants, places: Places, protocol: str) -> None:
    """The stack, which has the routes, is asked about packets that are longer than its device."""
    flow = answered(both, places, protocol, "here")
    length = len(network(flow.request))
    for mtu_there, fits in ((length, True), (length - 1, False)):
        into_pod(both, places, mtu_there)
        assert goes_into_pod(run(both.fast, flow.request, "uplink", "pods")) == fits


@protocols
def test_last_hop_before_a_pod(both: TwoVariants, places: Places, protocol: str) -> None:
    flow = answered(both, places, protocol, "here")
    into_pod(both, places)
    assert both.fast.ingress(with_hops(flow.request, 1), "uplink").action == "pass"


@protocols
def test_a_pod_that_moves(both: TwoVariants, places: Places, protocol: str) -> None:
    """The way into the pod counts at each packet: without one the request leaves by its route."""
    flow = answered(both, places, protocol, "here")
    into_pod(both, places)
    assert goes_into_pod(run(both.fast, flow.request, "uplink", "pods"))
    both.fast.delete("pod_devices", [ip_address(places.here)])
    came = run(both.fast, flow.request, "uplink", "pods")
    assert came.action == "redirect"
    assert not goes_into_pod(came)


@protocols
def test_switched_off(both: TwoVariants, places: Places, protocol: str) -> None:
    """Without the setting all packets pass the stack, also those of flows that did not."""
    flow = answered(both, places, protocol, "here")
    into_pod(both, places)
    both.fast.settings("detect_local")
    for _ in range(TRIES):
        both.fast.through(flow.request, "uplink", "pods")
        both.fast.through(flow.reply, "pods", "uplink")


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
    for _ in range(SEEN + TRIES):
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
