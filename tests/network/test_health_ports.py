# SPDX-License-Identifier: Apache-2.0
"""The agents' HTTP ports, from outside, from a pod and from the node.

The packets go through the agents' own programs at every device (kube-proxy.md 10 and 13).
"""

from socket import SOCK_STREAM
from typing import Any, NamedTuple

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from tests.kit.parameters import families
from tests.kit.requests import family_of
from tests.kit.sockets import Socket
from tests.kit.two_nodes import TwoNodes

PORT = 32100


class Reply(NamedTuple):
    code: int
    weight: int | None
    body: str


def get(two: TwoNodes, client: Host, host: str, port: int = PORT, path: str = "/") -> Reply:
    """Send a request. Raises OSError, such as ConnectionResetError if there is no answer."""
    with two.sockets(client).open(family_of(host), SOCK_STREAM) as stream:
        stream.connect((host, port))
        stream.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        head, _, body = _everything(stream).decode().partition("\r\n\r\n")
    if not head:
        raise ConnectionResetError
    line, *headers = head.split("\r\n")
    named = dict(header.split(": ") for header in headers)
    weight = named.get("X-Load-Balancing-Endpoint-Weight")
    return Reply(int(line.split()[1]), int(weight) if weight else None, body)


def _everything(stream: Socket) -> bytes:
    said = b""
    while more := stream.recv(4096):
        said += more
    return said


def balanced(two: TwoNodes, *pods: Host, **more: Any) -> list[Manifest]:
    spec: dict[str, Any] = {"externalTrafficPolicy": "Local", "healthCheckNodePort": PORT}
    return two.service("checked", 7, *pods, **spec, **more)


def address(host: Host, v6: bool) -> str:
    return host.v6 if v6 else host.v4


def tells(two: TwoNodes, node: Host, v6: bool, code: int) -> None:
    """Return when the node gives this answer; counts are updated shortly after a sync."""
    host = address(node, v6)

    def said() -> bool:
        try:
            return get(two, node, host).code == code
        except ConnectionError:
            return False

    wait_until(f"{node.name} says {code}", said)


@families
def test_asked_from_everywhere(two: TwoNodes, v6: bool) -> None:
    """The node with the endpoint answers 200, the other node 503, to every client."""
    two.publish(balanced(two, two.here))
    tells(two, two.near, v6, 200)
    tells(two, two.far, v6, 503)
    for client in (two.outside, two.hooked, two.unhooked, two.near, two.far):
        near, far = (get(two, client, address(node, v6)) for node in (two.near, two.far))
        assert near[:2] == (200, 1)
        assert far[:2] == (503, 0)
        assert '"name": "checked"' in near.body


def test_proxy_mode_on_loopback_only(two: TwoNodes) -> None:
    """/proxyMode answers on loopback only; the e2e test reads it from a pod in the host's
    network.
    """
    assert get(two, two.near, "127.0.0.1", 10249, "/proxyMode")[::2] == (200, "ebpf")
    with pytest.raises(ConnectionRefusedError):
        get(two, two.outside, two.near.v4, 10249, "/proxyMode")
