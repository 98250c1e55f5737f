# SPDX-License-Identifier: Apache-2.0
"""How a socket without an endpoint is refused, and when it must not be refused."""

from collections.abc import Mapping
from ipaddress import ip_address

import pytest

from ebpflb.kernel.stale import is_untranslated
from tests.native.node import HOST, POD, UDP, NativeNode, Socket

ECONNREFUSED = 111
BACKEND = "10.1.0.1:8080"

REFUSING = [
    ("172.30.0.1:80", "127.0.0.1"),
    ("[fd00:30::1]:80", "[::1]"),
    ("[::ffff:172.30.0.1]:80", "[::ffff:127.0.0.1]"),
]


def is_refused(node: NativeNode, socket: Socket, hook: str, to: str, loopback: str) -> bool:
    """Whether the call is refused.

    With bpf_set_retval the refusal is an errno; without it, it is a destination that refuses.
    """
    answer = getattr(socket, hook)(to)
    if node.kernel.names_errno:
        return bool(answer == (False, ECONNREFUSED, to))
    return bool(answer == (True, 0, f"{loopback}:{1 if socket.protocol == UDP else 0}"))


@pytest.mark.parametrize(("to", "loopback"), REFUSING)
@pytest.mark.parametrize(("protocol", "hook"), [("tcp", "connect"), ("udp", "sendmsg")])
def test_no_endpoint(node: NativeNode, to: str, loopback: str, protocol: str, hook: str) -> None:
    """Without any endpoint the connection is refused at once, and counted."""
    node.publish(1, [f"172.30.0.1:80/{protocol}", f"[fd00:30::1]:80/{protocol}"])
    assert is_refused(node, node.socket(protocol), hook, to, loopback)
    assert node.counted() == {"refused": 1}
    assert node.kernel.get("service_stats", 1).refused == 1


@pytest.mark.parametrize("netns", [HOST, POD])
@pytest.mark.parametrize(("to", "loopback"), REFUSING)
@pytest.mark.parametrize("has_address", [True, False])
def test_udp_connect_succeeds_without_endpoints(
    node: NativeNode, to: str, loopback: str, netns: int, has_address: bool
) -> None:
    """The packets are refused, not the call: a pod's at its device, the node's own at a port that
    no process has. That is at the Node's address, if this machine has it, else at loopback.
    """
    node.publish(1, ["172.30.0.1:80/udp", "[fd00:30::1]:80/udp"])
    node.settings(node_v4=ip_address("192.0.2.1"), node_v6=ip_address("2001:db8::1"))
    if has_address:
        node.has("192.0.2.1", "2001:db8::1")
        loopback = loopback.replace("127.0.0.1", "192.0.2.1").replace("[::1]", "[2001:db8::1]")
    socket = node.socket("udp", netns=netns)
    place = f"{loopback}:1" if netns == HOST else to
    assert socket.connect(to) == (True, 0, place)
    assert node.counted() == {"refused": 1}
    assert socket.getpeername(place) == socket.recvmsg(place) == to
    remembered = [entry.peer for entry in node.kernel.sockets().values()]
    assert [is_untranslated(entry) for entry in remembered] == ([True] if netns == HOST else [])
    socket.release()
    assert not node.kernel.sockets() and not node.kernel.items("assignments")


def test_connected_again_when_served(node: NativeNode) -> None:
    """The entry of a waiting socket ends when the socket gets a backend."""
    node.publish(1, ["172.30.0.1:80/udp"])
    socket = node.socket("udp", netns=HOST)
    socket.connect("172.30.0.1:80")
    node.publish(1, ["172.30.0.1:80/udp"], cluster=[BACKEND])
    assert socket.connect("172.30.0.1:80").place == BACKEND
    remembered = [entry.peer for entry in node.kernel.sockets().values()]
    assert not any(map(is_untranslated, remembered))
    assert socket.getpeername(BACKEND) == "172.30.0.1:80"


def test_refused_leaves_no_trace(node: NativeNode) -> None:
    """A refused call leaves no peer and no assignment."""
    node.publish(1, ["172.30.0.1:80", "172.30.0.1:80/udp"], affinity=60)
    node.socket("tcp").connect("172.30.0.1:80")
    node.socket("udp").sendmsg("172.30.0.1:80")
    assert not any(node.kernel.remembered().values())
    assert not node.kernel.items("affinity")


@pytest.mark.parametrize("at", ["127.0.0.1", "[::1]"])
def test_datagrams_to_loopback_without_endpoint(node: NativeNode, at: str) -> None:
    """Datagrams to loopback go to an unused port, because no device refuses them there."""
    node.publish(1, {"0.0.0.0:30080/udp": "external", "[::]:30080/udp": "external"})
    assert node.socket("udp", netns=HOST).connect(f"{at}:30080") == (True, 0, f"{at}:1")


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_no_local_endpoint(node: NativeNode, protocol: str) -> None:
    """With endpoints only elsewhere and internal policy Local there is no answer, and the request
    is counted.
    """
    node.publish(1, {f"172.30.0.1:80/{protocol}": "local"}, cluster=[BACKEND])
    assert node.socket(protocol).connect("172.30.0.1:80") == (True, 0, "172.30.0.1:80")
    assert node.counted() == {"no_local_endpoint": 1}
    assert node.kernel.get("service_stats", 1) == (0, 0, 0, 1)


DENIED = [
    ("203.0.113.1:80", {"203.0.113.1:80": "external load_balancer restricted"}, "source_denied"),
    ("[fd03::1]:80", {"[fd03::1]:80": "external load_balancer restricted"}, "source_denied"),
    ("172.30.0.1:80", {"172.30.0.1:80": "local"}, "no_local_endpoint"),
]


@pytest.mark.parametrize(("to", "frontends", "verdict"), DENIED, ids=[d[0] for d in DENIED])
@pytest.mark.parametrize(
    ("protocol", "hook"), [("tcp", "connect"), ("udp", "connect"), ("udp", "sendmsg")]
)
def test_a_call_that_kube_proxy_would_drop_fails_at_once(
    node: NativeNode, to: str, frontends: Mapping[str, str], verdict: str, protocol: str, hook: str
) -> None:
    """The node's own call is denied at the socket, a pod's packets are dropped at its device."""
    flags = {f"{place}/{protocol}": words for place, words in frontends.items()}
    node.publish(1, flags, cluster=[BACKEND])
    answer = getattr(node.socket(protocol, netns=HOST), hook)(to)
    assert node.counted() == {verdict: 1}
    assert getattr(node.socket(protocol, netns=POD), hook)(to) == (True, 0, to)
    if node.kernel.names_errno:
        assert answer == (False, 110 if protocol == "tcp" else 1, to)
    elif protocol == "tcp":
        assert answer.place == ("[::1]:0" if to.startswith("[") else "127.0.0.1:0")
    else:
        assert not answer.allowed
