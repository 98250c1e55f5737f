# SPDX-License-Identifier: Apache-2.0
"""Where replies go that the programs send on themselves: endpoints on this node and on another one,
beyond a tunnel.

With --reply-path=request-device routing rules lead what either endpoint sends to the second uplink,
where it is lost. With --fast-forward established flows pass no chain of netfilter on the node, by
the kernel's flowtable. In each set-up requests, large transfers and ICMP errors reach whom they are
for.
"""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from ebpflb.lab.agents import wait_until
from tests.kit import needs, requests
from tests.kit.lab_cluster import started
from tests.kit.parameters import families
from tests.kit.policy_routed import OURS, OWN_TARGET, SERVED, TwoPlaces
from tests.kit.requests import Send
from tests.kit.sockets import Socket

IPPROTO_IP, IPPROTO_IPV6 = 0, 41
# linux/in.h, linux/in6.h: level, IP_RECVERR, IP_TTL, IP_MTU_DISCOVER
OPTIONS = {False: (IPPROTO_IP, 11, 2, 10), True: (IPPROTO_IPV6, 25, 16, 23)}
COUNTED = """
table inet counted {
    chain forward {
        type filter hook forward priority 0;
        meta l4proto { tcp, udp } counter
    }
}
"""
DATAGRAMS, LARGE = 300, 16 << 20
SEEN = 19  # packets of each direction that pass the stack, at most


class SetUp(NamedTuple):
    """The agent's options, and whether rules lead replies astray."""

    options: tuple[str, ...]
    astray: bool = False

    @property
    def is_fast(self) -> bool:
        return "--fast-forward" in self.options


BY_DEVICE = SetUp(("--packet-path=flows", "--reply-path=request-device"), astray=True)
FAST = SetUp(("--packet-path=netfilter", "--fast-forward"))
_FAST = pytest.param(FAST, id="fast netfilter", marks=pytest.mark.extended)

each_set_up = pytest.mark.parametrize(
    "places", [pytest.param(BY_DEVICE, id="by device"), _FAST], indirect=True
)
fast_forward = pytest.mark.parametrize("places", [_FAST], indirect=True)
endpoints = pytest.mark.parametrize("name", ["web-1", "there"])


@pytest.fixture(scope="module")
def set_up(places: TwoPlaces, request: pytest.FixtureRequest) -> SetUp:
    """That of ``places``."""
    return SetUp(places.agent.options, places.second_uplink)


@pytest.fixture(scope="module")
def places(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoPlaces]:
    chosen: SetUp = request.param
    if chosen.is_fast:
        needs.flowtable()
    folder = tmp_path_factory.mktemp("places")
    with started(
        lambda lab: TwoPlaces(lab, folder, *chosen.options, second_uplink=chosen.astray)
    ) as made:
        made.node.nft(COUNTED)
        made.serve_both()
        yield made


def forwarded(places: TwoPlaces) -> int:
    """TCP segments and datagrams that passed FORWARD."""
    command = [*places.node.enter, "nft", "-j", "list", "table", "inet", "counted"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    (rule,) = (each["rule"] for each in listed["nftables"] if "rule" in each)
    return sum(e["counter"]["packets"] for e in rule["expr"] if "counter" in e)


@contextmanager
def conversation(places: TwoPlaces, name: str, *, v6: bool) -> Iterator[tuple[Socket, Socket]]:
    """Datagram sockets of a client and of a pod, connected to what they see of each other. With
    --fast-forward further datagrams pass no stack.
    """
    pod, client = places.pod_of(name), places.outside
    level, recverr, _, _ = OPTIONS[v6]
    with (
        requests.udp_socket(places.sockets(pod), pod.v6 if v6 else pod.v4) as server,
        requests.udp_socket(places.sockets(client), client.v6 if v6 else client.v4) as asking,
    ):
        server.bind((pod.v6 if v6 else pod.v4, OWN_TARGET))
        server.setsockopt(level, recverr, 1)
        asking.setsockopt(level, recverr, 1)
        asking.connect(places.to(name, OURS, v6=v6))
        asking.send(b"?")
        _, peer = server.recvfrom(64)
        server.connect(peer[:2])
        server.send(b"!")
        assert asking.recv(64) == b"!"
        for _ in range(SEEN):
            asking.send(b"?")
            assert server.recv(64) == b"?"
            server.send(b"!")
            assert asking.recv(64) == b"!"
        yield asking, server


@each_set_up
@families
@endpoints
def test_replies(places: TwoPlaces, name: str, v6: bool) -> None:
    """They reach the client, in every protocol, in fragments too."""
    where = places.to(name, SERVED, v6=v6)
    sends: list[Send] = [requests.tcp, requests.udp, requests.connected_udp, requests.fragmented]
    for send in sends:
        assert send(places.sockets(places.outside), *where).name == name


@each_set_up
@families
@endpoints
def test_large_transfers(places: TwoPlaces, set_up: SetUp, name: str, v6: bool) -> None:
    """Megabytes go and come back unchanged, in segments larger than the path takes. With
    --fast-forward openings, ends and few others pass the stack.
    """
    where, before = places.to(name, SERVED, v6=v6), forwarded(places)
    if not set_up.is_fast:
        assert places.echo(places.outside, *where) == name
        return
    assert places.echo(places.outside, *where, size=LARGE) == name
    assert forwarded(places) - before < LARGE // 1500 // 10
    wait_until("its entries have ended", lambda: ended(places))


def ended(places: TwoPlaces) -> bool:
    """Whether every connection's entries say that both sides have closed."""
    entries = [flow for _, flow in places.maps["tcp_flows"].items()]
    return all(flow.flags & {"fin", "rst"} for flow in entries)


@fast_forward
@families
@endpoints
def test_most_datagrams(places: TwoPlaces, name: str, v6: bool) -> None:
    """FORWARD sees no datagram of an answered flow, in either direction."""
    with conversation(places, name, v6=v6) as (client, server):
        before = forwarded(places)
        for _ in range(DATAGRAMS):
            client.send(b"?")
            assert server.recv(64) == b"?"
            server.send(b"!")
            assert client.recv(64) == b"!"
        assert forwarded(places) - before < DATAGRAMS
