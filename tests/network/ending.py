# SPDX-License-Identifier: Apache-2.0
"""Datagram sockets that are ended: how their owners hear it, and when all have heard it.

Every change ends a backend of another service too, last: when a socket of that is ended, whatever
was to be ended has been.
"""

from typing import Any

from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import TIMEOUT, Socket, Sockets
from tests.network import asking
from tests.network.asking import Answer
from tests.network.cluster import PORT, TARGET, Cluster, at, web

WATCH = "10.96.0.31"
SOURCE = 12345  # the client's port, as `nc -u -p 12345`


class Published:
    """``change`` publishes, and returns when every stale socket has been ended."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.turn = cluster, 0
        self.witness = asking.datagram(cluster.sockets(cluster.client), WATCH)

    def change(self, *said: list[Manifest]) -> None:
        self.publish(*said)
        answer = meet(self.witness, WATCH)
        self.turn += 1
        self.publish(*said)
        assert is_ended(self.witness), f"{answer.name} has gone from the service beside it"

    def publish(self, *said: list[Manifest]) -> None:
        self.cluster.publish(*said, self._beside(self.cluster.web[self.turn % 2]))

    def _beside(self, pod: Host) -> list[Manifest]:
        named = [{"name": "udp", "port": TARGET, "protocol": "UDP"}]
        return [
            manifests.service("zz", [WATCH], [{**named[0], "port": PORT}]),
            manifests.endpoint_slice("zz", "IPv4", [at(pod)], named),
        ]

    def close(self) -> None:
        self.witness.close()


def fixed(sockets: Sockets, address: str) -> Socket:
    """A datagram socket with a source port of its own."""
    opened = asking.datagram(sockets, address)
    opened.bind(("::" if ":" in address else "0.0.0.0", SOURCE))
    return opened


def meet(client: Socket, address: str, port: int = PORT) -> Answer:
    """Connects, and asks."""
    client.connect((address, port))
    return ask(client)


def ask(client: Socket) -> Answer:
    client.send(b"?")
    return asking.receive(client)


def is_ended(client: Socket, seconds: float = 10 * TIMEOUT) -> bool:
    """Whether its owner hears so, in so many seconds."""
    client.settimeout(seconds)
    try:
        client.recv(64)
    except ConnectionAbortedError:
        return True
    except TimeoutError:
        return False
    finally:
        client.settimeout(TIMEOUT)
    return False


def both(*pods: Host, **conditions: bool) -> dict[str, Any]:
    """The pods as endpoints of both families."""
    v6 = [at(pod, v6=True, **conditions) for pod in pods]
    return {"v4": [at(pod, **conditions) for pod in pods], "v6": v6}


def serve(*pods: Host, **spec: Any) -> list[Manifest]:
    ends = both(*pods)
    return web(*ends["v4"], v6=ends["v6"], **spec)
