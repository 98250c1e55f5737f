# SPDX-License-Identifier: Apache-2.0
"""Which addresses are frontends: exact matches first, then NodePorts of this node only."""

import pytest

from ebpflb.entries.services import Settings
from tests.native.node import HOST, POD, NativeNode

INITIAL = 0xF00000004
BACKEND = "10.1.0.1:8080"
BACKEND6 = "[fd00:1::1]:8080"


@pytest.fixture
def node_port(node: NativeNode) -> NativeNode:
    """Publish NodePort 30080 in both families, on a node with an address in each."""
    node.owns("192.0.2.1", "2001:db8::1")
    node.publish(1, {"0.0.0.0:30080": "external"}, cluster=[BACKEND])
    node.publish(2, {"[::]:30080": "external"}, cluster=[BACKEND6])
    return node


@pytest.mark.parametrize(
    "to", ["128.0.0.1:30080", "126.255.255.255:30080", "0.0.0.1:30080", "[::2]:30080"]
)
def test_not_quite_loopback(node_port: NativeNode, to: str) -> None:
    """Only 127.0.0.0/8, ::1 and the unspecified addresses are loopback."""
    assert node_port.socket(netns=HOST).connect(to).place == to


@pytest.mark.parametrize(("netns", "goes"), [(HOST, "127.0.0.1:30080"), (INITIAL, BACKEND)])
def test_unknown_host(node_port: NativeNode, netns: int, goes: str) -> None:
    """If the agent does not know its network namespace (before 5.14), the initial one is the
    node's.
    """
    node_port.kernel.put("settings", 0, Settings(0, 0, frozenset()))
    node_port.kernel.initial_netns = INITIAL
    assert node_port.socket(netns=netns).connect("127.0.0.1:30080").place == goes


@pytest.mark.parametrize("at", ["127.0.0.1:7445", "[::1]:7445"])
def test_loopback_is_the_nodes_alone(node: NativeNode, at: str) -> None:
    """A frontend on loopback serves only the node's processes, not pods."""
    backend = BACKEND6 if "[" in at else BACKEND
    node.publish(1, {at: "external"}, cluster=[backend])
    assert node.socket(netns=HOST).connect(at) == (True, 0, backend)
    assert node.socket(netns=POD).connect(at) == (True, 0, at)
