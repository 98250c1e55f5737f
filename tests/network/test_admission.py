# SPDX-License-Identifier: Apache-2.0
"""Which external IPs are served, and who is admitted to NodePorts, as the operator says."""

import pytest

from ebpflb.lab import cni, manifests
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import CALL_SECONDS
from tests.kit import requests, two_nodes
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import families, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes

GUARDED, OTHER, OPEN = Frontends(10), Frontends(20), Frontends(30)
A_MOMENT = 0.3  # seconds in which nothing may happen
EXTERNAL = "--external-ips", "203.0.113.0/28,fd03:113::10/128"
NODEPORTS = "--nodeport-source-ranges", "198.51.100.0/24,fd03::/64"
UNSPECIFIED = "0.0.0.0", "::"
PORTS = [{"name": name, "protocol": name.upper()} for name in ("tcp", "udp")]
ANNOTATION = "ebpflb.io/nodeport-source-ranges"

everyone = pytest.mark.parametrize("who", ["outside", "unhooked", "hooked", "near"])


def publish(two: TwoNodes) -> None:
    numbers = {"web": 10, "other": 20, "open": 30}
    services = {name: two.service(name, n, two.here) for name, n in numbers.items()}
    services["other"][0]["metadata"]["annotations"] = {ANNOTATION: ",".join(cni.NETWORKS)}
    services["open"][0]["metadata"]["annotations"] = {ANNOTATION: ""}
    two.publish(*services.values(), thief(two))


two = two_nodes.fixture(*EXTERNAL, *NODEPORTS, publish=publish)


def thief(two: TwoNodes) -> list[Manifest]:
    """A Service whose load balancer is said to have unspecified addresses, on a NodePort's port."""
    ports = [{**each, "port": OPEN.nodeport} for each in PORTS]
    answers = [{**each, "port": TARGET} for each in PORTS]
    cluster = Frontends(40).cluster
    return [
        manifests.service("a-thief", cluster, ports, type="LoadBalancer", ingress=UNSPECIFIED),
        manifests.endpoint_slice("a-thief", "IPv4", two.endpoints(two.twin), answers),
        manifests.endpoint_slice("a-thief", "IPv6", two.endpoints(two.twin, v6=True), answers),
    ]


def answered(
    two: TwoNodes, who: str, where: tuple[str, int], send: Send, seconds: float = CALL_SECONDS
) -> bool:
    """Whether an endpoint answers in so many seconds."""
    with requests.socket_of(send, two.sockets(getattr(two, who)), where[0]) as client:
        client.settimeout(seconds)
        try:
            client.connect(where)
            client.send(b"?")
            return client.recv(64).startswith(b"here")
        except OSError:
            return False


@pytest.mark.extended
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
        OTHER: who in ("unhooked", "hooked"),
        OPEN: True,
    }
    for frontends, is_admitted in admitted.items():
        where = frontends.to("nodeport", two.near, v6=v6)
        seconds = CALL_SECONDS if is_admitted else A_MOMENT
        assert answered(two, who, where, send, seconds) is is_admitted
        assert answered(two, who, frontends.to("cluster", two.near, v6=v6), send)


@families
@protocols
@everyone
def test_unspecified_load_balancers_take_no_nodeports(
    two: TwoNodes, who: str, send: Send, v6: bool
) -> None:
    """A Service that claims 0.0.0.0 and :: gets nobody's NodePort; its own frontends are served."""
    assert answered(two, who, OPEN.to("nodeport", two.near, v6=v6), send)
    where = Frontends(40).cluster[v6], OPEN.nodeport
    assert send(two.sockets(getattr(two, who)), *where).name == "twin"
    log = two.agents[0].log()
    assert log.count(f'"{UNSPECIFIED[v6]}" is an unspecified address') == 1
