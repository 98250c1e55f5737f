# SPDX-License-Identifier: Apache-2.0
"""A NodePort cannot be bound on this node."""

import pytest

from ebpflb.entries.services import Settings
from tests.native.node import HOST, POD, NativeNode

EADDRINUSE = 98
NODE_ADDRESSES = ("192.0.2.1", "2001:db8::1")


@pytest.fixture
def both(node: NativeNode) -> NativeNode:
    """Publish NodePort 30080 in both families, TCP."""
    return with_node_ports(node, "0.0.0.0:30080", "[::]:30080")


def with_node_ports(node: NativeNode, *frontends: str) -> NativeNode:
    node.owns(*NODE_ADDRESSES)
    node.publish(1, dict.fromkeys(frontends, "external"), cluster=["10.1.0.1:8080"])
    return node


def is_taken(node: NativeNode, at: str, *, netns: int = HOST, protocol: str = "tcp") -> bool:
    """Whether the bind fails with an errno that explains it."""
    answer = node.socket(protocol, netns=netns).bind(at)
    assert answer.errno == (0 if answer.allowed else EADDRINUSE)
    assert node.counted() == ({} if answer.allowed else {"nodeport_bind_denied": 1})
    return not answer.allowed


TAKEN = [
    "0.0.0.0:30080",
    "[::]:30080",
    "[::ffff:0.0.0.0]:30080",
    "192.0.2.1:30080",
    "[2001:db8::1]:30080",
    "[::ffff:192.0.2.1]:30080",
    "127.0.0.1:30080",
    "127.0.0.9:30080",
    "[::1]:30080",
]


@pytest.mark.parametrize("at", TAKEN)
def test_a_bind_to_a_served_nodeport_fails(both: NativeNode, at: str) -> None:
    """Where the NodePort is served the bind fails, if the hook can set the errno."""
    assert is_taken(both, at) == both.kernel.names_errno


@pytest.mark.parametrize("at", TAKEN)
def test_in_a_pod_every_port_is_free(both: NativeNode, at: str) -> None:
    assert not is_taken(both, at, netns=POD)


@pytest.mark.parametrize("at", TAKEN)
def test_guard_off(both: NativeNode, at: str) -> None:
    """The operator can switch the guard off."""
    both.kernel.put("settings", 0, Settings(HOST, 0, frozenset()))
    assert not is_taken(both, at)


@pytest.mark.parametrize(
    ("at", "protocol"),
    [
        ("0.0.0.0:30081", "tcp"),
        ("0.0.0.0:30080", "udp"),
        ("[::]:30080", "udp"),
        ("192.0.2.2:30080", "tcp"),
        ("[2001:db8::2]:30080", "tcp"),
        ("0.0.0.0:80", "tcp"),
        ("0.0.0.0:0", "tcp"),
        ("0.0.0.0:32885", "tcp"),  # 30080 with its bytes swapped
    ],
)
def test_other_ports_and_addresses_are_free(both: NativeNode, at: str, protocol: str) -> None:
    """Other ports, protocols and addresses can be bound."""
    assert not is_taken(both, at, protocol=protocol)


@pytest.mark.parametrize(
    ("node_port", "at", "taken"),
    [
        ("0.0.0.0:30080", "0.0.0.0:30080", True),
        ("0.0.0.0:30080", "[::]:30080", True),
        ("0.0.0.0:30080", "[::1]:30080", False),
        ("0.0.0.0:30080", "[2001:db8::1]:30080", False),
        ("[::]:30080", "[::]:30080", True),
        ("[::]:30080", "0.0.0.0:30080", False),
        ("[::]:30080", "192.0.2.1:30080", False),
    ],
)
def test_one_family(node: NativeNode, node_port: str, at: str, taken: bool) -> None:
    """A NodePort of one family takes only addresses of that family; :: stands for both families."""
    with_node_ports(node, node_port)
    assert is_taken(node, at) == (taken and node.kernel.names_errno)


def test_before_the_agent_has_spoken(both: NativeNode) -> None:
    """Before the agent has written settings, no port is guarded."""
    both.kernel.tables["settings"].places.clear()
    assert not is_taken(both, "0.0.0.0:30080", netns=both.kernel.initial_netns)
