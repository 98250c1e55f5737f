# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' e2e tests of ports and slices (kube-proxy.md 18), within one node."""

from pathlib import Path

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import TARGET, VIP, VIP6, Cluster, endpoint, web
from tests.network.e2e import down, reaches, up

SECOND_TARGET = 9090


@pytest.fixture(scope="module")
def more_ports(cluster: Cluster) -> None:
    """Every pod serves SECOND_TARGET too, as "web-1-again" and so on."""
    for pod in cluster.web:
        cluster.start_program(pod, "serve", f"{pod.name}-again", str(SECOND_TARGET))


def ports(*named: tuple[str, int]) -> list[Manifest]:
    return [{"name": name, "port": port} for name, port in named]


def manual(name: str, listed: list[Manifest], *endpoints: Manifest) -> Manifest:
    """A further slice of the service web, written by hand."""
    return manifests.endpoint_slice("web", "IPv4", list(endpoints), listed, name=name)


def test_serve_multiport_endpoints(cluster: Cluster, sockets: Sockets, pods: list[Host]) -> None:
    """Two named ports backed by different pods: each port reaches its own pod only."""
    service = manifests.service("web", [VIP], ports(("a", 80), ("b", 81)))
    first = manual("web-1", ports(("a", TARGET)), endpoint(pods[0]))
    second = manual("web-2", ports(("b", TARGET)), endpoint(pods[1]))
    cluster.publish(service, first, second)
    up(sockets, "web-1", port=80)
    up(sockets, "web-2", port=81)
    cluster.publish(service, second)
    down(sockets, port=80)
    up(sockets, "web-2", port=81)


def test_several_ports_in_several_slices(
    cluster: Cluster, sockets: Sockets, pods: list[Host], more_ports: None
) -> None:
    """Two manual slices with different ports of the same pod: both work."""
    service = manifests.service("web", [VIP], ports(("port80", 80), ("port81", 81)))
    cluster.publish(
        service,
        manual("one", ports(("port80", TARGET)), endpoint(pods[0])),
        manual("two", ports(("port81", SECOND_TARGET)), endpoint(pods[0])),
    )
    up(sockets, "web-1", port=80)
    up(sockets, "web-1-again", port=81)


def test_named_target_port(
    cluster: Cluster, sockets: Sockets, pods: list[Host], more_ports: None
) -> None:
    """One port name that resolves to different numbers: traffic reaches them all."""
    cluster.publish(
        manifests.service("web", [VIP], ports(("http", 80))),
        manual("one", ports(("http", TARGET)), endpoint(pods[0])),
        manual("two", ports(("http", SECOND_TARGET)), endpoint(pods[1])),
    )
    up(sockets, "web-1", "web-2-again")


def test_adding_and_deleting_ports(cluster: Cluster, sockets: Sockets, pods: list[Host]) -> None:
    """A service port that is added serves, one that is taken away is refused."""
    slices = manual("one", ports(("a", TARGET), ("b", TARGET)), endpoint(pods[0]))
    for listed in ([("a", 80)], [("a", 80), ("b", 81)], [("b", 81)]):
        cluster.publish(manifests.service("web", [VIP], ports(*listed)), slices)
        for number in (80, 81):
            check = up if number in {port for _, port in listed} else down
            check(sockets, *(["web-1"] if check is up else []), port=number)


def test_protocols_of_one_port(cluster: Cluster, pod: Sockets, pods: list[Host]) -> None:
    """TCP and UDP on one port: taking one away fails exactly that one, and back again."""
    for kept in ({"tcp", "udp"}, {"tcp"}, {"udp"}, {"tcp", "udp"}):
        service, *slices = web(endpoint(pods[0]))
        service["spec"]["ports"] = [it for it in service["spec"]["ports"] if it["name"] in kept]
        cluster.publish(service, *slices)
        for name, send in (("tcp", requests.tcp), ("udp", requests.connected_udp)):
            if name in kept:
                assert send(pod, VIP).name == "web-1"
            else:
                down(pod, send=send)


@pytest.mark.parametrize("ips", [[VIP], [VIP6], [VIP, VIP6], [VIP6, VIP]], ids=" ".join)
def test_families(cluster: Cluster, sockets: Sockets, pods: list[Host], ips: list[str]) -> None:
    """A service of one family or of both, in either order, is up in its families and no other."""
    _, *slices = web(endpoint(pods[0]), v6=[endpoint(pods[1], v6=True)])
    cluster.publish(manifests.service("web", ips, ports(("tcp", 80))), *slices)
    for vip, pod in ((VIP, "web-1"), (VIP6, "web-2")):
        if vip in ips:
            up(sockets, pod, host=vip)
        else:
            assert not reaches(sockets, vip, 80, is_up=False)


def test_sctp_service(cluster: Cluster, pods: list[Host]) -> None:
    """An SCTP service is programmed, and no protocol comes to the kernel for its sake."""
    before = protocols()
    sctp = [{"name": "s", "port": 80, "protocol": "SCTP"}]
    cluster.publish(
        manifests.service("web", [VIP, VIP6], sctp),
        manifests.endpoint_slice("web", "IPv4", [endpoint(pods[0])], [{**sctp[0], "port": TARGET}]),
    )
    found = {(str(it), it.protocol) for it, _ in cluster.maps["services"].items()}
    assert (f"{VIP}:80", 132) in found
    assert protocols() == before


def protocols() -> set[str]:
    """Those that the kernel has sockets for."""
    return {line.split()[0] for line in Path("/proc/net/protocols").read_text().splitlines()}
