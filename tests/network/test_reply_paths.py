# SPDX-License-Identifier: Apache-2.0
"""Replies that the programs themselves forward to the client, from endpoints on this node and on
another node beyond a tunnel.

With --reply-path=request-device, routing rules lead the packets of both endpoints to the second
uplink, where they are lost. With --fast-forward the kernel's flowtable forwards established flows,
so they pass no chain of netfilter on the node.
"""

import json
import subprocess
from collections.abc import Iterator

import pytest

from ebpflb.lab.agents import wait_until
from tests.kit import needs, requests
from tests.kit.lab_cluster import started
from tests.kit.parameters import families
from tests.kit.policy_routed import SERVICES, TwoPlaces
from tests.kit.requests import Send

COUNTED = """
table inet counted {
    chain forward {
        type filter hook forward priority 0;
        meta l4proto { tcp, udp } counter
    }
}
"""
LARGE = 16 << 20


BY_DEVICE = ("--packet-path=flows", "--reply-path=request-device")
FAST = ("--packet-path=netfilter", "--fast-forward")

each_set_up = pytest.mark.parametrize(
    "places",
    [
        pytest.param(BY_DEVICE, id="by device"),
        pytest.param(FAST, id="fast netfilter", marks=pytest.mark.extended),
    ],
    indirect=True,
)
endpoints = pytest.mark.parametrize("name", SERVICES)


@pytest.fixture(scope="module")
def places(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoPlaces]:
    options = request.param
    if options == FAST:
        needs.flowtable()
    folder, astray = tmp_path_factory.mktemp("places"), options == BY_DEVICE
    with started(lambda lab: TwoPlaces(lab, folder, *options, second_uplink=astray)) as made:
        made.node.nft(COUNTED)
        made.serve()
        yield made


def forwarded(places: TwoPlaces) -> int:
    """Return how many TCP segments and datagrams passed FORWARD."""
    command = [*places.node.enter, "nft", "-j", "list", "table", "inet", "counted"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    (rule,) = (each["rule"] for each in listed["nftables"] if "rule" in each)
    return sum(e["counter"]["packets"] for e in rule["expr"] if "counter" in e)


@each_set_up
@families
@endpoints
def test_replies_reach_the_client(places: TwoPlaces, name: str, v6: bool) -> None:
    """Replies reach the client in every protocol, even in fragments."""
    where = places.to(name, v6=v6)
    sends: list[Send] = [requests.tcp, requests.udp, requests.connected_udp, requests.fragmented]
    for send in sends:
        assert send(places.sockets(places.outside), *where).name == name


@each_set_up
@families
@endpoints
def test_large_transfers(places: TwoPlaces, name: str, v6: bool) -> None:
    """Megabytes are sent and returned unchanged, in segments larger than the path allows. With
    --fast-forward only the packets that open and end a connection, and a few other ones, pass the
    stack.
    """
    where, before = places.to(name, v6=v6), forwarded(places)
    if places.agent.options != FAST:
        assert places.echo(places.outside, *where) == name
        return
    assert places.echo(places.outside, *where, size=LARGE) == name
    assert forwarded(places) - before < LARGE // 1500 // 10
    wait_until("its entries have ended", lambda: ended(places))


def ended(places: TwoPlaces) -> bool:
    """Whether every connection's entries say that both sides have closed."""
    entries = [flow for _, flow in places.maps["tcp_flows"].items()]
    return all(flow.flags & {"fin", "rst"} for flow in entries)
