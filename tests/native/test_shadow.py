# SPDX-License-Identifier: Apache-2.0
"""With --shadow every call is unchanged, and the decisions for the node itself are counted."""

import pytest

from tests.native.node import HOST, POD, NativeNode

WEB, NOBODY, UNKNOWN = "172.30.0.1:80", "172.30.0.2:80", "172.30.0.1:81"
BACKEND = "10.1.0.1:8080"
IN_FORCE = ("guard_nodeports",)
SHADOW = (*IN_FORCE, "shadow")


@pytest.fixture(params=["tcp", "udp"])
def protocol(request: pytest.FixtureRequest, node: NativeNode) -> str:
    found: str = request.param
    node.publish(1, [f"{WEB}/{found}"], cluster=[BACKEND])
    node.publish(2, [f"{NOBODY}/{found}"])
    node.settings(*SHADOW)
    return found


@pytest.mark.parametrize(
    ("to", "verdict"), [(WEB, "translated"), (NOBODY, "refused"), (UNKNOWN, "passed")]
)
def test_calls_go_on_and_are_counted(
    node: NativeNode, protocol: str, to: str, verdict: str
) -> None:
    """Only the node's own calls are counted; nothing is stored about the socket."""
    socket = node.socket(protocol, netns=HOST)
    assert socket.connect(to) == (True, 0, to)
    assert socket.getpeername(to) == to
    assert node.counted() == {verdict: 1}
    assert not node.kernel.sockets()
    assert not node.kernel.items("assignments")


def test_a_pods_calls_are_counted_at_its_device(node: NativeNode, protocol: str) -> None:
    """A pod's call is counted at its device only, so that each request counts once."""
    socket = node.socket(protocol, netns=POD)
    assert socket.connect(WEB) == (True, 0, WEB)
    assert node.counted() == {}


def test_existing_sockets_go_on(node: NativeNode, protocol: str) -> None:
    """An existing socket still shows its frontend, until it connects again."""
    node.settings(*IN_FORCE)
    socket = node.socket(protocol, netns=HOST)
    assert socket.connect(WEB).place == BACKEND
    node.settings(*SHADOW)
    assert socket.getpeername(BACKEND) == WEB
    assert socket.connect(NOBODY) == (True, 0, NOBODY)
    assert not node.kernel.sockets()
