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
    ("to", "goes"),
    [
        ("172.30.0.1:80", "10.1.0.1:8080"),
        ("172.30.0.1:81", "172.30.0.1:81"),
        ("172.30.0.2:80", "172.30.0.2:80"),
        ("[fd00:30::1]:80", "[fd00:1::1]:8080"),
        ("[fd00:30::2]:80", "[fd00:30::2]:80"),
        ("[::ffff:172.30.0.1]:80", "[::ffff:10.1.0.1]:8080"),
    ],
)
def test_a_frontend_is_found_by_address_and_port(node: NativeNode, to: str, goes: str) -> None:
    """A frontend is found by address and port; IPv6 sockets reach IPv4 frontends by v4-mapped
    addresses.
    """
    node.publish(1, ["172.30.0.1:80"], cluster=[BACKEND])
    node.publish(2, ["[fd00:30::1]:80"], cluster=[BACKEND6])
    answer = node.socket().connect(to)
    assert answer == (True, 0, goes)
    assert node.counted() == {"passed" if to == goes else "translated": 1}


def test_exact_before_node_port(node_port: NativeNode) -> None:
    """A service IP on one of the node's addresses wins over a NodePort of the same number."""
    node_port.publish(3, ["192.0.2.1:30080"], cluster=["10.1.0.3:8080"])
    assert node_port.socket().connect("192.0.2.1:30080").place == "10.1.0.3:8080"


@pytest.mark.parametrize("netns", [HOST, POD])
@pytest.mark.parametrize(
    ("to", "goes"),
    [
        ("192.0.2.1:30080", BACKEND),
        ("[2001:db8::1]:30080", BACKEND6),
        ("[::ffff:192.0.2.1]:30080", "[::ffff:10.1.0.1]:8080"),
    ],
)
def test_node_port(node_port: NativeNode, netns: int, to: str, goes: str) -> None:
    """A NodePort is served on the node's addresses, to pods and to the node."""
    assert node_port.socket(netns=netns).connect(to).place == goes


@pytest.mark.parametrize("netns", [HOST, POD])
@pytest.mark.parametrize(
    "to", ["192.0.2.2:30080", "[2001:db8::2]:30080", "[::ffff:192.0.2.2]:30080", "192.0.2.1:30081"]
)
def test_node_port_elsewhere(node_port: NativeNode, netns: int, to: str) -> None:
    """Another node's NodePort is left to that node."""
    assert node_port.socket(netns=netns).connect(to) == (True, 0, to)
    assert node_port.counted() == {"passed": 1}


LOOPBACK = [
    ("127.0.0.1:30080", BACKEND),
    ("127.1.2.3:30080", BACKEND),
    ("0.0.0.0:30080", BACKEND),
    ("[::1]:30080", BACKEND6),
    ("[::]:30080", BACKEND6),
    ("[::ffff:127.0.0.1]:30080", "[::ffff:10.1.0.1]:8080"),
    ("[::ffff:0.0.0.0]:30080", "[::ffff:10.1.0.1]:8080"),
]


@pytest.mark.parametrize(("to", "goes"), LOOPBACK)
def test_loopback_of_the_node(node_port: NativeNode, to: str, goes: str) -> None:
    """In the node's own namespace loopback and unspecified addresses serve NodePorts."""
    assert node_port.socket(netns=HOST).connect(to).place == goes


@pytest.mark.parametrize(("to", "goes"), LOOPBACK)
def test_loopback_of_a_pod(node_port: NativeNode, to: str, goes: str) -> None:
    """A pod's loopback serves no NodePorts."""
    answer = node_port.socket(netns=POD).connect(to)
    assert answer.place == to != goes


@pytest.mark.parametrize(
    "to", ["128.0.0.1:30080", "126.255.255.255:30080", "0.0.0.1:30080", "[::2]:30080"]
)
def test_not_quite_loopback(node_port: NativeNode, to: str) -> None:
    """Only 127.0.0.0/8, ::1 and the unspecified addresses are loopback."""
    assert node_port.socket(netns=HOST).connect(to).place == to


def test_unspecified_is_no_service_ip(node: NativeNode) -> None:
    """The unspecified address in a NodePort's entry is not a frontend to connect to."""
    node.publish(1, {"0.0.0.0:30080": "external"}, cluster=[BACKEND])
    assert node.socket(netns=POD).connect("0.0.0.0:30080").place == "0.0.0.0:30080"


@pytest.mark.parametrize(
    ("published", "to"),
    [
        ("0.0.0.0:30080", "[2001:db8::1]:30080"),
        ("0.0.0.0:30080", "[::1]:30080"),
        ("[::]:30080", "192.0.2.1:30080"),
        ("[::]:30080", "[::ffff:192.0.2.1]:30080"),
        ("[::]:30080", "127.0.0.1:30080"),
    ],
)
def test_node_port_of_one_family(node: NativeNode, published: str, to: str) -> None:
    """A NodePort of one family is not served on addresses of the other family."""
    node.owns("192.0.2.1", "2001:db8::1")
    node.publish(1, {published: "external"}, cluster=[BACKEND])
    assert node.socket(netns=HOST).connect(to).place == to


@pytest.mark.parametrize(("netns", "goes"), [(HOST, "127.0.0.1:30080"), (INITIAL, BACKEND)])
def test_unknown_host(node_port: NativeNode, netns: int, goes: str) -> None:
    """If the agent does not know its network namespace (before 5.14), the initial one is the
    node's.
    """
    node_port.kernel.put("settings", 0, Settings(0, 0, frozenset()))
    node_port.kernel.initial_netns = INITIAL
    assert node_port.socket(netns=netns).connect("127.0.0.1:30080").place == goes


def test_a_removed_frontend_is_not_translated(node: NativeNode) -> None:
    """The address of a removed frontend is not translated."""
    node.publish(1, ["172.30.0.1:80"], cluster=[BACKEND])
    node.withdraw(1, "172.30.0.1:80")
    assert node.socket().connect("172.30.0.1:80").place == "172.30.0.1:80"


@pytest.mark.parametrize("at", ["127.0.0.1:7445", "[::1]:7445"])
def test_loopback_is_the_nodes_alone(node: NativeNode, at: str) -> None:
    """A frontend on loopback serves only the node's processes, not pods."""
    backend = BACKEND6 if "[" in at else BACKEND
    node.publish(1, {at: "external"}, cluster=[backend])
    assert node.socket(netns=HOST).connect(at) == (True, 0, backend)
    assert node.socket(netns=POD).connect(at) == (True, 0, at)
