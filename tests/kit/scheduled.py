# SPDX-License-Identifier: Apache-2.0
"""A Service "web" with a scheduler on two nodes, and the clients of the near node."""

from collections.abc import Iterable
from contextlib import ExitStack
from itertools import count

from ebpflb.lab import traffic
from ebpflb.lab.agents import wait_until
from ebpflb.lab.manifests import Manifest
from ebpflb.model.annotations import SCHEDULER_ANNOTATION, WEIGHT_ANNOTATION
from tests.kit import requests
from tests.kit.requests import Answer, Send
from tests.kit.sockets import Socket, Sockets
from tests.kit.two_nodes import Frontends, TwoNodes

NUMBER = 10
WEB = Frontends(NUMBER)
ENDPOINTS = ("here", "twin", "there")
BY_SOCKETS = ("hooked", "near")
CLIENTS = (*BY_SOCKETS, "unhooked", "outside")  # the last two by packets

_ports = count(15_000)  # of packets' clients: another flow each


def udp(sockets: Sockets, host: str, port: int) -> Answer:
    """Send a datagram from an unused port, because a flow would stay at its endpoint."""
    with requests.udp_socket(sockets, host) as client:
        client.bind(("::" if ":" in host else "0.0.0.0", next(_ports)))
        return requests.exchange(client, host, port)


SENDS = {"tcp": requests.tcp, "udp": udp}
# Sockets and packets, each by both protocols, and in both families.
KINDS = [
    ("hooked", "tcp", False),
    ("hooked", "udp", True),
    ("unhooked", "udp", False),
    ("outside", "tcp", True),
]


def service(two: TwoNodes, scheduler: str | None, *pods: str) -> list[Manifest]:
    """Return the Service with this scheduler or none, and these endpoints or all."""
    made = two.service("web", NUMBER, *(getattr(two, pod) for pod in pods or ENDPOINTS))
    if scheduler:
        made[0]["metadata"]["annotations"] = {SCHEDULER_ANNOTATION: scheduler}
    return made


def slices(two: TwoNodes, pod: str, weight: int) -> list[Manifest]:
    """Return slices of the Service for one endpoint, with its weight."""
    made = service(two, None, pod)[1:]
    for each in made:
        each["metadata"]["name"] += f"-{pod}"
        each["metadata"]["annotations"] = {WEIGHT_ANNOTATION: str(weight)}
    return made


def weighted(two: TwoNodes, scheduler: str, weights: Iterable[int]) -> list[Manifest]:
    """Return the Service; its endpoints have these weights."""
    made = service(two, scheduler)[:1]
    for pod, weight in zip(ENDPOINTS, weights, strict=True):
        made += slices(two, pod, weight)
    return made


def frontend(two: TwoNodes, who: str, *, v6: bool = False) -> tuple[str, int]:
    """Return the frontend for a client; for the client outside it is the NodePort."""
    return WEB.to("nodeport" if who == "outside" else "cluster", two.near, v6=v6)


def met(
    two: TwoNodes, who: str, times: int, send: Send = requests.tcp, *, v6: bool = False
) -> list[str]:
    """Return the endpoint of each connection."""
    where = frontend(two, who, v6=v6)
    return [send(two.sockets(getattr(two, who)), *where).name for _ in range(times)]


def dial(
    two: TwoNodes, who: str, opened: ExitStack, protocol: str = "tcp", *, v6: bool = False
) -> tuple[str, Socket]:
    """Return the endpoint of an open connection, or connected UDP socket, and the client."""
    where = frontend(two, who, v6=v6)
    client = requests.socket_of(SENDS[protocol], two.sockets(getattr(two, who)), where[0])
    opened.enter_context(client)
    client.connect(where)
    if protocol == "udp":
        client.send(b"?")
    return traffic.read(client.recv(64))[0], client


def loads(two: TwoNodes) -> list[int]:
    """Return the near node's counts of open connections, without zeros, the largest first."""
    counts = [each.open for _, each in two.maps["backend_loads"].items() if each.open]
    return sorted(counts, reverse=True)


def settled(two: TwoNodes, *wanted: int) -> None:
    """Return when the counts are these: the last FIN may still be on its way."""
    expected = sorted(filter(None, wanted), reverse=True)
    wait_until(f"the counts are {expected}", lambda: loads(two) == expected, 60)
