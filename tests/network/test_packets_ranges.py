# SPDX-License-Identifier: Apache-2.0
"""loadBalancerSourceRanges: who may come by a load balancer's address (kube-proxy.md 7)."""

import pytest

from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import CALL_SECONDS
from tests.kit import requests
from tests.kit.parameters import both_engines, families, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes

pytestmark = both_engines

FRONTENDS = Frontends(10)
A_MOMENT = 0.3  # seconds in which nothing may happen

everyone = pytest.mark.parametrize("who", ["outside", "unhooked", "hooked", "near"])


def admit(two: TwoNodes, *hosts: Host, ranges: tuple[str, ...] = ()) -> None:
    """Only these may come; the ranges of both families are never empty."""
    mine = [f"{host.v4}/32" for host in hosts] + [f"{host.v6}/128" for host in hosts]
    sources = [*mine, *ranges, "240.0.0.0/32", "fd99::/128"]
    two.delete_flows("other_flows")
    two.publish(two.service("web", 10, two.here, two.there, loadBalancerSourceRanges=sources))


def comes(
    two: TwoNodes, who: str, kind: str, send: Send, seconds: float = CALL_SECONDS, *, v6: bool
) -> bool:
    """Whether an endpoint answers in so many seconds; a refusal is an error."""
    where = FRONTENDS.to(kind, two.near, v6=v6)
    return requests.is_answered(send, two.sockets(getattr(two, who)), where, seconds)


@pytest.mark.extended
@families
@protocols
@everyone
def test_admitted(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """Whose address is in the ranges is served."""
    admit(two, getattr(two, who))
    assert comes(two, who, "balancer", send, v6=v6)


@families
@protocols
@everyone
def test_denied(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """Everyone else gets nothing, pods and the node too."""
    admit(two, *{two.outside, two.unhooked, two.hooked, two.near} - {getattr(two, who)})
    assert not comes(two, who, "balancer", send, A_MOMENT, v6=v6)


@families
@protocols
@everyone
@pytest.mark.parametrize("kind", ["cluster", "nodeport", "external"])
def test_other_ways(two: TwoNodes, who: str, kind: str, send: Send, v6: bool) -> None:
    """Cluster IP, NodePort and external IP are open to all."""
    admit(two)
    assert comes(two, who, kind, send, v6=v6)


@families
def test_wider_ranges(two: TwoNodes, v6: bool) -> None:
    """A range admits all that it covers, and a change is in force at once."""
    admit(two, ranges=("198.51.0.0/16", "fd03::/16"))
    assert comes(two, "outside", "balancer", requests.tcp, v6=v6)
    admit(two, ranges=("198.51.101.0/24", "fd03:1::/32"))
    assert not comes(two, "outside", "balancer", requests.tcp, A_MOMENT, v6=v6)
    two.publish(two.service("web", 10, two.here, two.there))
    assert comes(two, "outside", "balancer", requests.tcp, v6=v6)


@families
def test_connections_stay(two: TwoNodes, v6: bool) -> None:
    """A connection from before its client was excluded goes on."""
    admit(two, two.outside)
    where = FRONTENDS.to("balancer", two.near, v6=v6)
    with requests.tcp_socket(two.sockets(two.outside), where[0]) as client:
        client.connect(where)
        client.recv(64)
        admit(two)
        client.send(b"still there?")
        assert client.recv(64) == b"still there?"
