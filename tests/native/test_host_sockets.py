# SPDX-License-Identifier: Apache-2.0
"""--socket-translation=host leaves pods' sockets alone, and keeps the existing entries about
them.
"""

import pytest

from tests.native.node import HOST, POD, NativeNode

WEB, NOBODY, UNKNOWN = "172.30.0.1:80", "172.30.0.2:80", "172.30.0.1:81"
BACKEND, OTHER = "10.1.0.1:8080", "10.1.0.2:8080"
ALL = ("guard_nodeports",)
HOST_ONLY = (*ALL, "host_sockets")


@pytest.fixture(params=["tcp", "udp"])
def protocol(request: pytest.FixtureRequest, node: NativeNode) -> str:
    found: str = request.param
    node.publish(1, [f"{WEB}/{found}"], cluster=[BACKEND])
    node.publish(2, [f"{NOBODY}/{found}"])
    node.settings(*HOST_ONLY)
    return found


@pytest.mark.parametrize("to", [WEB, NOBODY, UNKNOWN])
def test_a_pod_connects_to_the_service_itself(node: NativeNode, protocol: str, to: str) -> None:
    """A pod's connect keeps the service's address: the program at the device decides."""
    socket = node.socket(protocol, netns=POD)
    assert socket.connect(to) == (True, 0, to)
    assert socket.getpeername(to) == to
    assert node.counted() == {"passed": 1}
    assert not node.kernel.sockets()


def test_a_pods_datagrams_go_to_the_service_itself(node: NativeNode) -> None:
    """A pod's datagrams go to the service's address too, even from an unconnected socket."""
    node.publish(1, [f"{WEB}/udp"], cluster=[BACKEND])
    node.settings(*HOST_ONLY)
    assert node.socket("udp", netns=POD).sendmsg(WEB) == (True, 0, WEB)
    assert node.socket("udp", netns=HOST).sendmsg(WEB).place == BACKEND


def test_the_node_is_connected_to_the_backend(node: NativeNode, protocol: str) -> None:
    """The node's sockets are connected to the backend, because no program at a device could
    translate its own packets.
    """
    socket = node.socket(protocol, netns=HOST)
    assert socket.connect(WEB).place == BACKEND
    assert socket.getpeername(BACKEND) == WEB


def test_existing_sockets_go_on(node: NativeNode, protocol: str) -> None:
    """A pod's earlier socket still shows the service, and is forgotten when it is closed."""
    node.settings(*ALL)
    socket = node.socket(protocol, netns=POD)
    assert socket.connect(WEB).place == BACKEND
    node.settings(*HOST_ONLY)
    assert socket.getpeername(BACKEND) == WEB
    socket.release()
    assert not node.kernel.sockets()
    assert node.opened_closed(1, BACKEND) == (1, 1)


def test_an_unconnected_socket_keeps_its_backend(node: NativeNode) -> None:
    """A pod's socket keeps its backend, because the program at the device would draw another
    one.
    """
    node.publish(1, [f"{WEB}/udp"], cluster=[BACKEND])
    socket = node.socket("udp", netns=POD)
    assert socket.sendmsg(WEB).place == BACKEND
    node.publish(1, [f"{WEB}/udp"], cluster=[BACKEND, OTHER])
    node.settings(*HOST_ONLY)
    node.kernel.dice = lambda: 0xFFFFFFFF
    assert socket.sendmsg(WEB).place == BACKEND
    assert socket.recvmsg(BACKEND) == WEB
