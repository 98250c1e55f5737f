# SPDX-License-Identifier: Apache-2.0
"""Which external IPs are served, and who is admitted to NodePorts, as the operator says."""

from collections.abc import Iterator

import pytest

from ebpflb.lab import cni
from ebpflb.lab.sockets import TIMEOUT
from tests.kit import requests, two_nodes
from tests.kit.requests import Send
from tests.kit.two_nodes import CLUSTER_CIDR, Frontends, TwoNodes

GUARDED, OTHER, OPEN = Frontends(10), Frontends(20), Frontends(30)
A_MOMENT = 0.3  # seconds in which nothing may happen
EXTERNAL = "--external-ips", "203.0.113.0/28,fd03:113::10/128"
NODEPORTS = "--nodeport-source-ranges", "198.51.100.0/24,fd03::/64"
ANNOTATION = "ebpflb.io/nodeport-source-ranges"

families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
protocols = pytest.mark.parametrize("send", [requests.tcp, requests.udp])
everyone = pytest.mark.parametrize("who", ["outside", "hidden", "hooked", "near"])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    with two_nodes.running(
        tmp_path_factory.mktemp("two"), *CLUSTER_CIDR, *EXTERNAL, *NODEPORTS
    ) as made:
        numbers = {"web": 10, "other": 20, "open": 30}
        services = {name: made.service(name, n, made.here) for name, n in numbers.items()}
        services["other"][0]["metadata"]["annotations"] = {ANNOTATION: ",".join(cni.NETWORKS)}
        services["open"][0]["metadata"]["annotations"] = {ANNOTATION: ""}
        made.publish(*services.values())
        yield made


def answered(
    two: TwoNodes, who: str, where: tuple[str, int], send: Send, seconds: float = TIMEOUT
) -> bool:
    """Whether an endpoint answers in so many seconds."""
    make = requests.tcp_socket if send is requests.tcp else requests.udp_socket
    with make(two.sockets(getattr(two, who)), where[0]) as client:
        client.settimeout(seconds)
        try:
            client.connect(where)
            client.send(b"?")
            return client.recv(64).startswith(b"here")
        except OSError:
            return False


@families
@protocols
@everyone
def test_external_ips_that_are_allowed(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """They are served to all."""
    assert answered(two, who, GUARDED.to("external", two.near, v6=v6), send)


@families
@protocols
@everyone
def test_external_ips_that_are_not_allowed(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """They are nobody's, and the agent names them; the Service's other addresses are served."""
    address, port = OTHER.to("external", two.near, v6=v6)
    assert not answered(two, who, (address, port), send, A_MOMENT)
    assert answered(two, who, OTHER.to("cluster", two.near, v6=v6), send)
    log = two.agents[0].log()
    assert log.count(f"spec.externalIPs: {address} is not served") == 1


@families
@protocols
@everyone
def test_nodeports_admit_by_source(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """By the option, or by the Service's annotation instead; pods and the node included."""
    admitted = {
        GUARDED: who == "outside",
        OTHER: who in ("hidden", "hooked"),
        OPEN: True,
    }
    for frontends, is_admitted in admitted.items():
        where = frontends.to("nodeport", two.near, v6=v6)
        seconds = TIMEOUT if is_admitted else A_MOMENT
        assert answered(two, who, where, send, seconds) is is_admitted
        assert answered(two, who, frontends.to("cluster", two.near, v6=v6), send)
