# SPDX-License-Identifier: Apache-2.0
"""With --reply-path=request-device: endpoints on this node and on another one, beyond a tunnel.

The routing rules lead what either sends to clients to the second uplink, where it is lost. That
holds for large transfers and ICMP errors too.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ebpflb.lab import cni, manifests
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.sockets import Socket
from tests.kit import requests
from tests.kit.lab_cluster import TARGET, started
from tests.kit.policy_routed import PolicyRouted
from tests.kit.requests import Send

SERVED, OURS, CLOSED = 0, 1, 2  # ports of a service, after 30100 or 30200
OWN_TARGET = 9090  # a socket of the test's own
NARROW = 1280
IPPROTO_IP, IPPROTO_IPV6 = 0, 41
# linux/in.h, linux/in6.h: level, IP_RECVERR, IP_TTL, IP_MTU_DISCOVER
OPTIONS = {False: (IPPROTO_IP, 11, 2, 10), True: (IPPROTO_IPV6, 25, 16, 23)}
PMTUDISC_DO = 2

families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
endpoints = pytest.mark.parametrize("name", ["web-1", "there"])


class TwoPlaces(PolicyRouted):
    """A pod on this node, and one on another."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        options = ("--packet-path=flows", "--reply-path=request-device")
        super().__init__(lab, folder, *options, network=cni.Overlay())
        far = lab.node("far", 2, cni.Overlay())
        lab.join(self.node, far)
        self.there = lab.pod(far, "there", 11)
        self.start_program(self.there, "serve", self.there.name, str(TARGET))
        self.lead_astray(self.there)
        self.outside.ip("link set eth0 mtu 1450")  # as beyond the tunnel

    def pod_of(self, name: str) -> Host:
        return self.there if name == "there" else self.pod

    def serve_both(self) -> None:
        self.publish(
            [
                *self._service(self.pod, 30100, "node"),
                *self._service(self.there, 30200, "far"),
            ]
        )

    def _service(self, pod: Host, nodeport: int, node: str) -> list[manifests.Manifest]:
        named = [
            {"name": "tcp", "port": TARGET, "protocol": "TCP"},
            {"name": "udp", "port": TARGET, "protocol": "UDP"},
            {"name": "ours", "port": OWN_TARGET, "protocol": "UDP"},
            {"name": "closed", "port": OWN_TARGET + 1, "protocol": "UDP"},
        ]
        offsets = (SERVED, SERVED, OURS, CLOSED)
        ports = [
            {**port, "nodePort": nodeport + offset}
            for port, offset in zip(named, offsets, strict=True)
        ]
        number = nodeport // 100 - 290
        addresses = [f"10.96.0.{number}", f"fd00:96::{number}"]
        slices = [
            manifests.endpoint_slice(
                pod.name,
                family,
                [manifests.endpoint(where, node=node, target=pod.name)],
                named,
            )
            for family, where in (("IPv4", pod.v4), ("IPv6", pod.v6))
        ]
        return [manifests.service(pod.name, addresses, ports, type="NodePort"), *slices]

    def to(self, name: str, port: int, *, v6: bool) -> tuple[str, int]:
        """Where a client reaches this port of the pod's service."""
        nodeport = 30200 if name == "there" else 30100
        return (self.node.v6 if v6 else self.node.v4), nodeport + port


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoPlaces]:
    folder = tmp_path_factory.mktemp("places")
    with started(lambda lab: TwoPlaces(lab, folder)) as made:
        made.serve_both()
        yield made


@contextmanager
def conversation(places: TwoPlaces, name: str, *, v6: bool) -> Iterator[tuple[Socket, Socket]]:
    """Datagram sockets of a client and of a pod, connected to what they see of each other."""
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
        yield asking, server


def error_after(sender: Socket, receiver: Socket, payload: bytes) -> int:
    """The error that a socket gets for what it sends."""
    sender.settimeout(5)
    with pytest.raises(OSError) as caught:
        sender.send(payload)
        sender.recv(64)
    assert not isinstance(caught.value, TimeoutError), "no error came"
    receiver.settimeout(0.1)
    with pytest.raises(TimeoutError):
        receiver.recv(64)
    return caught.value.errno or 0


@families
@endpoints
def test_replies(places: TwoPlaces, name: str, v6: bool) -> None:
    """They reach the client, in every protocol, in fragments too."""
    where = places.to(name, SERVED, v6=v6)
    sends: list[Send] = [requests.tcp, requests.udp, requests.connected_udp, requests.fragmented]
    for send in sends:
        assert send(places.sockets(places.outside), *where).name == name


@families
@endpoints
def test_large_transfers(places: TwoPlaces, name: str, v6: bool) -> None:
    """A megabyte goes and comes back unchanged, in segments larger than the path takes."""
    assert places.echo(places.outside, *places.to(name, SERVED, v6=v6)) == name


@families
@endpoints
def test_bottleneck(places: TwoPlaces, name: str, v6: bool) -> None:
    """So it does where a router beyond takes less: its ICMP errors reach the endpoint."""
    places.lab.router.narrow(NARROW)
    try:
        assert places.echo(places.outside, *places.to(name, SERVED, v6=v6)) == name
        level, _, _, discover = OPTIONS[v6]
        with conversation(places, name, v6=v6) as (client, server):
            server.setsockopt(level, discover, PMTUDISC_DO)
            assert error_after(server, client, bytes(NARROW)) == errno.EMSGSIZE
    finally:
        places.lab.router.narrow()


@families
@endpoints
@pytest.mark.parametrize("beyond", [0, 1], ids=["node", "router"])
def test_time_exceeded_of_a_reply(places: TwoPlaces, name: str, beyond: int, v6: bool) -> None:
    """Whether its last hop is this node or a router beyond: the endpoint is told."""
    level, _, ttl, _ = OPTIONS[v6]
    hops = (2 if name == "there" else 1) + beyond
    with conversation(places, name, v6=v6) as (client, server):
        server.setsockopt(level, ttl, hops)
        assert error_after(server, client, b"too far") == errno.EHOSTUNREACH


@families
@endpoints
@pytest.mark.parametrize("hops", [1, 2], ids=["router", "node"])
def test_time_exceeded_of_a_request(places: TwoPlaces, name: str, hops: int, v6: bool) -> None:
    """Whether its last hop is a router before this node or the node: the client is told."""
    level, _, ttl, _ = OPTIONS[v6]
    with conversation(places, name, v6=v6) as (client, server):
        client.setsockopt(level, ttl, hops)
        assert error_after(client, server, b"too far") == errno.EHOSTUNREACH


@families
@endpoints
def test_port_unreachable(places: TwoPlaces, name: str, v6: bool) -> None:
    """The endpoint's error that nobody listens reaches the client, as a reply would."""
    where = places.to(name, CLOSED, v6=v6)
    with requests.udp_socket(places.sockets(places.outside), where[0]) as client:
        client.settimeout(5)
        client.connect(where)
        client.send(b"?")
        with pytest.raises(ConnectionRefusedError):
            client.recv(64)


@contextmanager
def narrow_device(places: TwoPlaces) -> Iterator[None]:
    places.node.ip(f"link set eth0 mtu {NARROW}")
    try:
        yield
    finally:
        places.node.ip("link set eth0 mtu 1500")


@families
def test_narrow_device(places: TwoPlaces, v6: bool) -> None:
    """An endpoint whose reply is too long for the device is told so, as the stack would do it."""
    level, _, _, discover = OPTIONS[v6]
    with narrow_device(places), conversation(places, "web-1", v6=v6) as (client, server):
        server.setsockopt(level, discover, PMTUDISC_DO)
        assert error_after(server, client, bytes(NARROW)) == errno.EMSGSIZE
        assert places.echo(places.outside, *places.to("web-1", SERVED, v6=v6)) == "web-1"
