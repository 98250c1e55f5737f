# SPDX-License-Identifier: Apache-2.0
"""The flow tables follow a TCP connection, segment by segment, like the kernel's conntrack.

In every state each side sends each kind of segment, to a router whose conntrack sees it, and
through the packet programs. Differences are in DIFFERENT, with the reason.
"""

import os
from collections.abc import Iterator
from ipaddress import ip_address
from itertools import count
from socket import AF_PACKET, SOCK_RAW, htons, socket
from typing import Any

import pytest

from ebpflb.entries.flows import Hook, Tuple, gather, state
from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab.netns import Namespace, ip
from ebpflb.model.services import Protocol
from tests.kernel.node import nodes
from tests.packet.frames import DEVICE, at, destination, host_of, port_of, segment, source
from tests.packet.node import PacketNode
from tests.packet.places import V4
from tests.packet.services import serve

NAME = f"ebpflb-test-{os.getpid()}-ct"
CLIENT, SERVER = "10.9.1.2", "10.9.2.2"
PORTS = count(10_000)
ETH_P_ALL = 3
ISNS = {"c": 1000, "b": 5000}
LATER = 700_000_000  # the number of another connection's SYN
STATES = {
    0: "none",
    1: "opening",  # SYN_SENT
    2: "answered",  # SYN_RECV
    3: "open",
    4: "closing",  # FIN_WAIT
    5: "closing",  # CLOSE_WAIT
    6: "closed",  # LAST_ACK
    7: "closed",  # TIME_WAIT
    8: "reset",  # CLOSE
    9: "opening",  # SYN_SENT2
}
OPENED = "c S", "b SA", "c A"
HISTORIES = {
    "SYN sent": OPENED[:1],
    "SYN answered": OPENED[:2],
    "established": OPENED,
    "client's FIN": (*OPENED, "c FA"),
    "backend's FIN": (*OPENED, "b FA"),
    "client's FIN acknowledged": (*OPENED, "c FA", "b A"),
    "backend's FIN acknowledged": (*OPENED, "b FA", "c A"),
    "both FINs, the client's first": (*OPENED, "c FA", "b A", "b FA"),
    "both FINs, the backend's first": (*OPENED, "b FA", "c A", "c FA"),
    "both FINs at once": (*OPENED, "c FA", "b FA"),
    "closed by the client": (*OPENED, "c FA", "b FA", "c A"),
    "closed by the backend": (*OPENED, "b FA", "c FA", "b A"),
    "reset by the client": (*OPENED, "c R"),
    "reset by the backend": (*OPENED, "b R"),
    "refused": ("c S", "b RA"),
}
EVENTS = [f"{side} {flags}" for side in "cb" for flags in ("S", "SA", "A", "FA", "R", "RA")]
EVENTS += ["c S later"]
ONE_FIN = ("client's FIN", "client's FIN acknowledged")
BACKENDS_FIN = ("backend's FIN", "backend's FIN acknowledged")
BOTH_FINS = ("both FINs, the client's first", "both FINs, the backend's first", "both FINs at once")
CLOSED = ("closed by the client", "closed by the backend")
# Why -> the histories and events where it is so, and the state of the flow tables.
DIFFERENT = {
    "a FIN of a side is one FIN however often it is sent; conntrack takes it for the other's": (
        ONE_FIN,
        ["c FA"],
        "closing",
    ),
    "the same of the backend": (BACKENDS_FIN, ["b FA"], "closing"),
    "a SYN after both FINs opens a connection, which conntrack leaves to the old backend": (
        BOTH_FINS,
        ["c S", "c S later"],
        "opening",
    ),
    "so after a reset by the backend, which has forgotten the connection; conntrack after 10 s": (
        ["reset by the backend"],
        ["c S", "c S later"],
        "opening",
    ),
    "a backend's SYN opens no flow of a service": (CLOSED, ["b S"], "closed"),
    "a reset that its side goes on after was forged": (
        ["reset by the client"],
        ["c SA", "c A"],
        "open",
    ),
    "the same of the backend's reset": (["reset by the backend"], ["b SA", "b A"], "open"),
    "what ends at once in conntrack is kept for 10 s": (
        ["SYN sent"],
        ["c R", "c RA", "b RA"],
        "reset",
    ),
    "a reset without acknowledgment refuses no SYN (RFC 9293 3.10.7.3)": (
        ["SYN sent"],
        ["b R"],
        "opening",
    ),
    "who acknowledges the backend's number has got it": (["SYN answered"], ["c SA"], "open"),
    "a refused flow is kept for 10 s, in which the backend may take it": (
        ["refused"],
        ["b SA"],
        "answered",
    ),
    "or show that the refusal was forged": (["refused"], ["b A"], "opening"),
    "else it stays as it was": (
        ["refused"],
        ["", "c SA", "c A", "c FA", "c R", "c RA", "b S", "b FA", "b R", "b RA"],
        "reset",
    ),
}


class Numbers:
    """The next sequence number of each side."""

    def __init__(self) -> None:
        self.next = dict(ISNS)

    def of(self, event: str) -> dict[str, Any]:
        side, flags, *later = event.split()
        other = "b" if side == "c" else "c"
        seq = LATER if later else ISNS[side] if "S" in flags else self.next[side]
        ack = self.next[other] if "A" in flags else 0
        self.next[side] = max(self.next[side], seq + ("S" in flags) + ("F" in flags))
        return {"flags": flags, "seq": seq, "ack": ack}


class Router(Namespace):
    """A namespace whose conntrack sees packets forwarded between two cables."""

    def build(self) -> None:
        self.create()
        ip("netns", "add", f"{self.netns}-ends")
        self.sysctl("net.ipv4.ip_forward", 1)
        self.nft("table ip t { chain c { type filter hook forward priority 0; ct state new; }; }")
        self.ends: dict[str, socket] = {}
        for side, host in (("c", CLIENT), ("b", SERVER)):
            cable = f"end-{side}"
            self.ip(
                f"link add {cable} address {DEVICE} type veth peer name {cable} "
                f"netns {self.netns}-ends",
                f"link set {cable} up",
                f"address add {host[:-1]}1/24 dev {cable}",
                f"neigh add {host} lladdr 02:00:00:00:00:fe dev {cable} nud permanent",
            )
            Namespace(f"{self.netns}-ends").ip(f"link set {cable} up")
            with nodes.entered(f"{self.netns}-ends"):
                self.ends[side] = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL))
            self.ends[side].bind((cable, ETH_P_ALL))
            self.ends[side].settimeout(60)

    def passes(self, side: str, frame: bytes) -> None:
        """Send a segment; return when the router has forwarded it."""
        self.ends[side].send(frame)
        other = self.ends["b" if side == "c" else "c"]
        while other.recv(2000)[34:54] != frame[34:54]:
            pass

    def state(self, port: int) -> str:
        with nodes.entered(self.netns):
            entries = conntrack.connections(lambda *_: True)
            found = [e for e in entries if port in (e.original.source_port, e.reply.source_port)]
        return STATES[found[0].tcp_state] if found else "none"


@pytest.fixture(scope="module")
def router() -> Iterator[Router]:
    made = Router(NAME)
    made.build()
    yield made
    for each in made.ends.values():
        each.close()
    for name in (NAME, f"{NAME}-ends"):
        ip("netns", "delete", name)


def in_conntrack(router: Router, events: list[str]) -> str:
    """Return conntrack's state after these segments."""
    ports, numbers = next(PORTS), Numbers()
    ends = {"c": at(CLIENT, ports), "b": at(SERVER, 80)}
    for event in events:
        side = event[0]
        other = "b" if side == "c" else "c"
        router.passes(side, bytes(segment(ends[side], ends[other], **numbers.of(event))))
    return router.state(ports)


def in_flow_tables(node: PacketNode, where: str, events: list[str]) -> str:
    """Return the programs' state after these segments, to an endpoint on another node."""
    client, numbers = at(V4.client, next(PORTS)), Numbers()
    for event in events:
        if event[0] == "c":
            seen = node.through(segment(client, where, **numbers.of(event)))
        else:
            node.through(segment(destination(seen), source(seen), **numbers.of(event)))
    hosts = ip_address(host_of(client)), ip_address(host_of(where))
    key = Tuple(*hosts, port_of(client), port_of(where), Protocol.TCP, Hook.INGRESS)
    table = node.maps["tcp_flows"]
    flow = table.get(key)
    return str(state(Protocol.TCP, gather(key, flow, table.get).values())) if flow else "none"


def expected(history: str, event: str, theirs: str) -> str:
    """Return conntrack's own state, unless it is named in DIFFERENT."""
    for histories, events, other in DIFFERENT.values():
        if history in histories and event in events:
            return other
    return theirs


@pytest.mark.parametrize("event", [None, *EVENTS])
@pytest.mark.parametrize("history", HISTORIES)
def test_same_state(node: PacketNode, router: Router, history: str, event: str | None) -> None:
    """After each segment the flow has the same state as in conntrack, except as in DIFFERENT."""
    where = serve(node, V4, "nodeport", cluster=[at(V4.there, 8080)])
    events = [*HISTORIES[history], *([event] if event else [])]
    theirs = in_conntrack(router, events)
    assert in_flow_tables(node, where, events) == expected(history, event or "", theirs)
