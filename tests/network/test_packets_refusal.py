# SPDX-License-Identifier: Apache-2.0
"""Packets without a backend: refused, dropped or left alone (kube-proxy.md 6)."""

import ctypes
import fcntl
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.kernel.maps.layout import VERDICTS
from ebpflb.lab import manifests
from tests.kernel.node import nodes
from tests.kit import requests
from tests.kit.lab_cluster import PORT
from tests.kit.parameters import both_engines, connecting, families
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes, address

pytestmark = both_engines

NOBODY, ELSEWHERE, SERVED = Frontends(10), Frontends(20), Frontends(30)
UNALLOCATED = ["10.96.200.200", "fd00:96::dead"]
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
A_MOMENT = 0.3  # seconds in which nothing may happen

clients = pytest.mark.parametrize("who", ["unhooked", "outside"])
kinds = pytest.mark.parametrize("kind", ["cluster", "nodeport", "external", "balancer"])


@pytest.fixture(scope="module", autouse=True)
def services(two: TwoNodes) -> None:
    two.publish(
        manifests.service_cidr("10.96.0.0/16", "fd00:96::/64"),
        two.service("nobody", 10),
        two.service("external", 20, two.there, externalTrafficPolicy="Local"),
        two.service("internal", 21, two.there, internalTrafficPolicy="Local"),
        two.service("served", 30, two.here, two.there),
    )


def client(two: TwoNodes, who: str, host: str, send: Send) -> Any:
    """A socket with a short timeout."""
    made = requests.socket_of(send, two.sockets(getattr(two, who)), host)
    made.settimeout(A_MOMENT)
    return made


def silence(two: TwoNodes, who: str, where: tuple[str, int], send: Send) -> None:
    """Neither an answer nor an error comes."""
    with client(two, who, where[0], send) as opened, pytest.raises(TimeoutError):
        opened.connect(where)
        opened.send(b"?")
        opened.recv(64)


def count(two: TwoNodes, verdict: str) -> int:
    """How often near came to this verdict."""
    (number,) = (i for i, name in VERDICTS.items() if name == verdict)
    return int(two.maps["verdicts"].get(number)[0])


@pytest.fixture
def without_checksums(two: TwoNodes) -> Iterator[None]:
    """near's devices to both clients make no checksums: the kernel makes those of what leaves."""
    with nodes.entered(two.near.netns):
        for device in ("veth3", "eth0"):
            checksum_offload(device, on=False)
    yield
    with nodes.entered(two.near.netns):
        for device in ("veth3", "eth0"):
            checksum_offload(device, on=True)


def checksum_offload(device: str, *, on: bool) -> None:
    """As ethtool -K DEVICE tx."""
    value = ctypes.create_string_buffer(struct.pack("II", ETHTOOL_STXCSUM, on), 8)
    request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCETHTOOL, request)


@families
@connecting
@clients
@pytest.mark.usefixtures("without_checksums")
def test_refused_by_a_device_that_makes_no_checksums(
    two: TwoNodes, who: str, send: Send, v6: bool
) -> None:
    """A refusal of a packet whose checksum was still to be made has a right one all the same."""
    with pytest.raises(ConnectionRefusedError):
        send(two.sockets(getattr(two, who)), *NOBODY.to("cluster", two.near, v6=v6))


@pytest.mark.extended
@families
@connecting
@kinds
@clients
def test_no_endpoint(two: TwoNodes, who: str, kind: str, send: Send, v6: bool) -> None:
    """A service without endpoints refuses, by each of its addresses."""
    with pytest.raises(ConnectionRefusedError):
        send(two.sockets(getattr(two, who)), *NOBODY.to(kind, two.near, v6=v6))


@families
@connecting
@clients
def test_unknown_port(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """A port of a cluster IP that is no service's is refused."""
    with pytest.raises(ConnectionRefusedError):
        send(two.sockets(getattr(two, who)), SERVED.cluster[v6], PORT + 1)


@families
@connecting
@clients
@pytest.mark.parametrize("kind", ["external", "balancer"])
def test_unknown_port_of_others(two: TwoNodes, who: str, kind: str, send: Send, v6: bool) -> None:
    """A port of an external address that is no service's is left alone."""
    host, port = SERVED.to(kind, two.near, v6=v6)
    silence(two, who, (host, port + 1), send)


@families
@connecting
@clients
def test_unallocated(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """An address kept for cluster IPs that is none swallows everything."""
    before = count(two, "unallocated")
    silence(two, who, (UNALLOCATED[v6], PORT), send)
    assert count(two, "unallocated") > before


@families
@connecting
@pytest.mark.parametrize("kind", ["nodeport", "external", "balancer"])
def test_external_local(two: TwoNodes, kind: str, send: Send, v6: bool) -> None:
    """Under the external policy Local, outside clients of a node without endpoints get nothing."""
    before = count(two, "no_local_endpoint")
    silence(two, "outside", ELSEWHERE.to(kind, two.near, v6=v6), send)
    assert count(two, "no_local_endpoint") > before


@families
@connecting
@clients
def test_internal_local(two: TwoNodes, who: str, send: Send, v6: bool) -> None:
    """Under the internal policy Local, all requests to the cluster IP are dropped."""
    before = count(two, "no_local_endpoint")
    silence(two, who, Frontends(21).to("cluster", two.near, v6=v6), send)
    assert count(two, "no_local_endpoint") > before


@families
@clients
def test_ping_cluster_ip(two: TwoNodes, who: str, v6: bool) -> None:
    """Pings to a cluster IP are refused, those to an unallocated address get nothing."""
    sockets = two.sockets(getattr(two, who))
    with pytest.raises(ConnectionRefusedError):
        requests.ping(sockets, SERVED.cluster[v6])
    assert not requests.ping(sockets, UNALLOCATED[v6], A_MOMENT)


@families
@clients
def test_ping_node(two: TwoNodes, who: str, v6: bool) -> None:
    """Pings to a node, and of a pod to a pod, are answered as ever."""
    sockets, like = two.sockets(getattr(two, who)), "::" if v6 else ""
    assert requests.ping(sockets, address(two.near, like))
    assert who == "outside" or requests.ping(sockets, address(two.there, like))
