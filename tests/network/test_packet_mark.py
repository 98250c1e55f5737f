# SPDX-License-Identifier: Apache-2.0
"""--packet-mark: a FORWARD chain that drops accepts what was translated, by its mark."""

from collections.abc import Iterator

import pytest

from ebpflb.lab.router import OUTSIDE
from tests.kit import requests, two_nodes
from tests.kit.lab_cluster import TARGET
from tests.kit.requests import Send
from tests.kit.two_nodes import CLUSTER_CIDR, Frontends, TwoNodes, address

ROUTER = OUTSIDE.gateways
WEB = Frontends(10)
OPTIONS = ("--packet-path", "flows", "--packet-mark", "0x4000/0x4000")
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

families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """Both nodes drop what they forward, unless it has the mark or belongs to a connection."""
    folder = tmp_path_factory.mktemp("two")
    with two_nodes.running(folder, *CLUSTER_CIDR, *OPTIONS) as made:
        made.publish(made.service("web", 10, made.here, made.there))
        made.near.nft(DROP)
        yield made


@pytest.mark.extended
@families
@pytest.mark.parametrize("send", [requests.tcp, requests.udp, requests.fragmented])
@pytest.mark.parametrize(("who", "kind"), [("outside", "nodeport"), ("unhooked", "cluster")])
def test_default_drop_forward_accepts_translated_packets(
    two: TwoNodes, who: str, kind: str, send: Send, v6: bool
) -> None:
    """Requests, and their replies: masqueraded (to the other node) or not."""
    where = WEB.to(kind, two.near, v6=v6)
    answers = [send(two.sockets(getattr(two, who)), *where) for _ in range(20)]
    assert {answer.name for answer in answers} == {"here", "there"}


@families
def test_default_drop_forward_drops_the_rest(two: TwoNodes, v6: bool) -> None:
    """What asks an endpoint itself is not translated, and has no mark."""
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
