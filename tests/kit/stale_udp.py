# SPDX-License-Identifier: Apache-2.0
"""Changes of endpoints, and the connected UDP sockets that they make stale.

Each change also replaces the backend of a service that only ``Changes`` uses. The agent ends the
stale sockets of that service last, so its ended socket shows that all others have ended.
"""

from typing import Any

from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from tests.kit import requests
from tests.kit.cluster import PORT, TARGET, Cluster, endpoint, web
from tests.kit.requests import Answer
from tests.kit.sockets import CALL_SECONDS, Socket, Sockets

MARKER = "10.96.0.31"
SOURCE = 12345  # the client's port, as `nc -u -p 12345`


class Changes:
    """Changes of endpoints; ``apply`` publishes, and returns when every stale socket has been
    ended.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.turn = cluster, 0
        self.marker = requests.udp_socket(cluster.sockets(cluster.client), MARKER)

    def apply(self, *said: list[Manifest]) -> None:
        self.publish(*said)
        answer = connect(self.marker, MARKER)
        self.turn += 1
        self.publish(*said)
        assert is_ended(self.marker), f"{answer.name} no longer serves {MARKER}"

    def publish(self, *said: list[Manifest]) -> None:
        self.cluster.publish(*said, self._marker_service(self.cluster.web[self.turn % 2]))

    def _marker_service(self, pod: Host) -> list[Manifest]:
        named = [{"name": "udp", "port": TARGET, "protocol": "UDP"}]
        return [
            manifests.service("zz", [MARKER], [{**named[0], "port": PORT}]),
            manifests.endpoint_slice("zz", "IPv4", [endpoint(pod)], named),
        ]

    def close(self) -> None:
        self.marker.close()


def bound_socket(sockets: Sockets, address: str) -> Socket:
    """Return a UDP socket that is bound to the port SOURCE."""
    opened = requests.udp_socket(sockets, address)
    opened.bind(("::" if ":" in address else "0.0.0.0", SOURCE))
    return opened


def connect(client: Socket, address: str, port: int = PORT) -> Answer:
    """Connect, then send a request and return the answer, like ``exchange``."""
    client.connect((address, port))
    return exchange(client)


def exchange(client: Socket) -> Answer:
    """Send a request, and return the answer."""
    client.send(b"?")
    return requests.receive(client)


def is_ended(client: Socket, seconds: float = 2 * CALL_SECONDS) -> bool:
    """Whether recv fails with ECONNABORTED within this many seconds."""
    client.settimeout(seconds)
    try:
        client.recv(64)
    except ConnectionAbortedError:
        return True
    except TimeoutError:
        return False
    finally:
        client.settimeout(CALL_SECONDS)
    return False


def dual_stack(*pods: Host, **conditions: Any) -> dict[str, Any]:
    """Return the pods as endpoints of both families."""
    v6 = [endpoint(pod, v6=True, **conditions) for pod in pods]
    return {"v4": [endpoint(pod, **conditions) for pod in pods], "v6": v6}


def dual_stack_web(*pods: Host, **spec: Any) -> list[Manifest]:
    """Return the Service default/web with these pods as endpoints of both families."""
    endpoints = dual_stack(*pods)
    return web(*endpoints["v4"], v6=endpoints["v6"], **spec)
