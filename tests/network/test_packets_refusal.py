# SPDX-License-Identifier: Apache-2.0
"""The checksums of refusals; test_packets_table tests packets without a backend."""

import ctypes
import fcntl
import socket
import struct
from collections.abc import Iterator

import pytest

from tests.kernel.node import nodes
from tests.kit.parameters import both_engines, connecting, families
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes

pytestmark = both_engines

NOBODY = Frontends(10)
SIOCETHTOOL, ETHTOOL_STXCSUM = 0x8946, 0x17

clients = pytest.mark.parametrize("who", ["unhooked", "outside"])


@pytest.fixture(scope="module", autouse=True)
def services(two: TwoNodes) -> None:
    two.publish(two.service("nobody", 10))


@pytest.fixture
def without_checksums(two: TwoNodes) -> Iterator[None]:
    """Turn off checksum offload at near's devices to both clients: the kernel computes them."""
    with nodes.entered(two.near.netns):
        for device in ("veth3", "eth0"):
            checksum_offload(device, on=False)
    yield
    with nodes.entered(two.near.netns):
        for device in ("veth3", "eth0"):
            checksum_offload(device, on=True)


def checksum_offload(device: str, *, on: bool) -> None:
    """Switch the offload as `ethtool -K DEVICE tx` does."""
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
    """A packet whose checksum was not computed yet is refused with a correct checksum."""
    with pytest.raises(ConnectionRefusedError):
        send(two.sockets(getattr(two, who)), *NOBODY.to("cluster", two.near, v6=v6))
