# SPDX-License-Identifier: Apache-2.0
"""Packets without a backend (kube-proxy.md 6): checksums and pings; test_packets_table has what
becomes of all others.
"""

import ctypes
import fcntl
import socket
import struct
from collections.abc import Iterator

import pytest

from ebpflb.lab import manifests
from tests.kernel.node import nodes
from tests.kit import requests
from tests.kit.parameters import both_engines, connecting, families
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes, address

pytestmark = both_engines

NOBODY, SERVED = Frontends(10), Frontends(30)
UNALLOCATED = ["10.96.200.200", "fd00:96::dead"]
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17
A_MOMENT = 0.3  # seconds in which nothing may happen

clients = pytest.mark.parametrize("who", ["unhooked", "outside"])


@pytest.fixture(scope="module", autouse=True)
def services(two: TwoNodes) -> None:
    two.publish(
        manifests.service_cidr("10.96.0.0/16", "fd00:96::/64"),
        two.service("nobody", 10),
        two.service("served", 30, two.here, two.there),
    )


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
