# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' e2e tests that take more than one node (kube-proxy.md 18); those of UDP clients that
keep their port are in test_moving_udp.

The endpoint ``here`` is on the node near, ``there`` on far; "hooked" and "there" are the pods that
ask, "near" and "far" the nodes.
"""

import pytest

from ebpflb.lab import manifests, traffic
from ebpflb.lab.hosts import Host
from tests.kit import requests
from tests.kit.parameters import both_engines, families
from tests.kit.sockets import CALL_SECONDS
from tests.kit.two_nodes import Frontends, TwoNodes

FRONTENDS = Frontends(10)
A_MOMENT = 0.3  # seconds after which nobody is going to answer
OLD_RANGE, NEW_RANGE = ("10.96.0.0/16", "fd00:96::/64"), ("10.97.0.0/24", "fd00:97::/112")

pytestmark = both_engines


def answer(
    two: TwoNodes,
    who: str,
    kind: str,
    node: Host,
    seconds: float = CALL_SECONDS,
    *,
    v6: bool = False,
) -> tuple[str, str]:
    """The backend that answers by TCP in so many seconds and the source it sees, or ("", "")."""
    where = FRONTENDS.to(kind, node, v6=v6)
    with requests.tcp_socket(two.sockets(getattr(two, who)), where[0]) as client:
        client.settimeout(seconds)
        try:
            client.connect(where)
            return traffic.read(client.recv(64))
        except TimeoutError:
            return "", ""


def is_up(two: TwoNodes, kind: str, node: Host, *who: str, v6: bool = False) -> list[bool]:
    return [answer(two, each, kind, node, v6=v6)[0] == "here" for each in who]


def is_silent(two: TwoNodes, kind: str, node: Host, *who: str, v6: bool = False) -> list[bool]:
    return [answer(two, each, kind, node, A_MOMENT, v6=v6) == ("", "") for each in who]


@families
def test_load_balancer_changes(two: TwoNodes, v6: bool) -> None:
    """Scaled to nothing it is refused, scaled up it is back; as a ClusterIP it is closed."""
    two.publish(two.service("web", 10, two.here))
    assert is_up(two, "balancer", two.near, "outside", "hooked", v6=v6) == [True, True]
    two.publish(two.service("web", 10))
    for who in ("outside", "hooked", "near"):
        with pytest.raises(ConnectionRefusedError):
            answer(two, who, "balancer", two.near, v6=v6)
    two.publish(two.service("web", 10, two.here))
    assert is_up(two, "balancer", two.near, "outside", "hooked", v6=v6) == [True, True]
    service, *slices = two.service("web", 10, two.here)
    del service["status"]
    service["spec"] |= {"type": "ClusterIP", "externalIPs": []}
    for port in service["spec"]["ports"]:
        del port["nodePort"]
    two.publish(service, *slices)
    with pytest.raises(ConnectionRefusedError):
        answer(two, "outside", "nodeport", two.near, v6=v6)
    assert is_silent(two, "balancer", two.near, "outside", v6=v6) == [True]
    assert is_up(two, "cluster", two.near, "hooked", v6=v6) == [True]


def unallocated(two: TwoNodes, host: str) -> bool:
    """Whether near drops what a pod sends there, as for an address that is kept and not given."""
    before = two.verdict("unallocated")
    with requests.tcp_socket(two.sockets(two.unhooked), host) as client, pytest.raises(OSError):
        client.settimeout(A_MOMENT)
        client.connect((host, 80))
    return two.verdict("unallocated") > before


@families
def test_different_service_cidrs(two: TwoNodes, v6: bool) -> None:
    """A new ServiceCIDR keeps its addresses at once, and a Service in it is served to all."""
    kept, new = manifests.service_cidr(*OLD_RANGE), manifests.service_cidr(*NEW_RANGE)
    new["metadata"]["name"] = "new"
    service, *slices = two.service("web", 10, two.here)
    service["spec"]["clusterIPs"] = vips = ["10.97.0.10", "fd00:97::10"]
    service["spec"]["clusterIP"] = vips[0]
    free = "fd00:97::99" if v6 else "10.97.0.99"
    for said, is_kept in (([kept], False), ([kept, new], True), ([kept], False)):
        two.publish(*said)
        assert unallocated(two, free) is is_kept
    two.publish(kept, new, service, *slices)
    for client in (two.hooked, two.unhooked, two.near, two.there, two.far):
        assert requests.tcp(two.sockets(client), vips[v6]).name == "here"
    assert unallocated(two, free)
