# SPDX-License-Identifier: Apache-2.0
"""Sockets that connect to an external address without an endpoint, and are left to the network."""

import pytest

from tests.native.node import HOST, POD, NativeNode

FLAGS = "external local passthrough"


@pytest.mark.parametrize("netns", [HOST, POD])
@pytest.mark.parametrize("place", ["203.0.113.1:80", "[fd03::1]:80"])
@pytest.mark.parametrize(
    ("protocol", "hook"), [("tcp", "connect"), ("udp", "connect"), ("udp", "sendmsg")]
)
def test_without_an_endpoint(
    node: NativeNode, netns: int, place: str, protocol: str, hook: str
) -> None:
    """The call goes to the address itself, even if that is an address of the node."""
    node.publish(1, {f"{place}/{protocol}": FLAGS})
    for count in (1, 2):
        socket = node.socket(protocol, netns=netns)
        assert getattr(socket, hook)(place) == (True, 0, place)
        assert node.counted() == {"passed_through": count}
        node.has(place.rpartition(":")[0].strip("[]"))
    assert node.kernel.get("service_stats", 1).refused == 0
