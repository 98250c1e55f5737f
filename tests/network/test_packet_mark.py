# SPDX-License-Identifier: Apache-2.0
"""--packet-mark: a FORWARD chain that drops by default accepts translated packets by their mark."""

import pytest

from ebpflb.model.packet_path import Engine
from tests.kit import requests, two_nodes
from tests.kit.parameters import families
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes

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
