# SPDX-License-Identifier: Apache-2.0
"""--packet-mark: a FORWARD chain that drops by default accepts translated packets by their mark."""

import pytest

from ebpflb.lab.router import OUTSIDE
from ebpflb.model.packet_path import Engine
from tests.kit import requests, two_nodes
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import families
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes, address

ROUTER = OUTSIDE.gateways
WEB = Frontends(10)
MARK = ("--packet-mark", "0x4000/0x4000")
DROP = """
table inet lab_forward {
    chain forward {
        type filter hook forward priority 0; policy drop;
        ct state established,related accept
        ip6 nexthdr icmpv6 accept
        meta mark & 0x4000 == 0x4000 accept
    }
}
"""


def publish(two: TwoNodes) -> None:
    """Publish a Service; the near node forwards only marked packets and known connections."""
    two.publish(two.service("web", 10, two.here, two.there))
    two.near.nft(DROP)


two = two_nodes.fixture(*MARK, engines=[Engine.FLOWS], publish=publish)


@pytest.mark.extended
@families
@pytest.mark.parametrize("send", [requests.tcp, requests.udp, requests.fragmented])
@pytest.mark.parametrize(("who", "kind"), [("outside", "nodeport"), ("unhooked", "cluster")])
def test_default_drop_forward_accepts_translated_packets(
    two: TwoNodes, who: str, kind: str, send: Send, v6: bool
) -> None:
    """Requests pass, whether or not they are masqueraded to the other node, and so do their
    replies.
    """
    where = WEB.to(kind, two.near, v6=v6)
    answers = [send(two.sockets(getattr(two, who)), *where) for _ in range(20)]
    assert {answer.name for answer in answers} == {"here", "there"}


@families
def test_default_drop_forward_drops_the_rest(two: TwoNodes, v6: bool) -> None:
    """A packet to an endpoint itself is not translated, and has no mark."""
    where = address(two.here, "::" if v6 else ""), TARGET
    two.outside.ip(f"route replace {where[0]} via {ROUTER[v6]}", v6=v6)
    two.lab.router.ip(
        f"route replace {where[0]} via {address(two.near, where[0])} table 100", v6=v6
    )
    with (
        requests.tcp_socket(two.sockets(two.outside), where[0]) as client,
        pytest.raises(TimeoutError),
    ):
        client.settimeout(0.3)
        client.connect(where)
