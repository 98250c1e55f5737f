# SPDX-License-Identifier: Apache-2.0
"""If another host gets a removed endpoint's address, no flow to the Service reaches it.

Upstream fixed the same bug for UDP in kube-proxy (kubernetes#139628, #141371).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EINPROGRESS
from socket import AF_INET6, SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.errors import NodeError
from ebpflb.lab import cni, traffic
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from tests.kit import requests
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import both_engines, families
from tests.kit.sockets import CALL_SECONDS, Socket
from tests.kit.two_nodes import Frontends, TwoNodes

pytestmark = both_engines

NUMBER = 40
FRONTENDS = Frontends(NUMBER)
A_MOMENT = 0.1  # seconds in which a datagram arrives
DATAGRAMS = 10


class Place:
    """A pod's address, which first belongs to an endpoint, and then to another host."""

    def __init__(self, two: TwoNodes) -> None:
        self.two = two
        self.pod = two.lab.pod(two.near, "leaver", 40)
        self.stranger = two.lab.pod(two.near, "stranger", 41, hooked=False)
        two.start_program(self.pod, "serve", self.pod.name, str(TARGET))
        self.inbox = two.sockets(self.stranger).open(AF_INET6, SOCK_DGRAM)
        self.inbox.bind(("::", TARGET))
        self.inbox.settimeout(A_MOMENT)

    def move(self, owner: Host, former: Host) -> None:
        """Give the address to another owner and announce it, even if it has moved already."""
        for address, length in ((self.pod.v4, 24), (self.pod.v6, 64)):
            with suppress(NodeError):
                former.ip(f"address delete {address}/{length} dev eth0")
        owner.ip(
            f"address replace {self.pod.v4}/24 dev eth0",
            f"address replace {self.pod.v6}/64 dev eth0 nodad",
            *(f"route replace default via {gateway}" for gateway in cni.addresses(1, 1)),
        )
        for host in (self.two.near, self.two.hooked, self.two.unhooked):
            host.ip("neighbour flush all")
            host.ip("neighbour flush all", v6=True)

    def received(self) -> int:
        """Return the datagrams that the other host has received since the last call."""
        count = 0
        with suppress(TimeoutError):
            while self.inbox.recv(64):
                count += 1
        return count


@pytest.fixture(scope="module")
def place(two: TwoNodes) -> Place:
    return Place(two)


@pytest.fixture
def leaver(two: TwoNodes, place: Place) -> Iterator[Host]:
    """Return the pod with the address, until a test gives it to another host."""
    two.delete_flows("other_flows")
    place.move(place.pod, place.stranger)
    place.received()
    yield place.pod


def send(client: Socket, count: int = DATAGRAMS) -> None:
    """Send a connected socket's datagrams; the socket may have been ended, or the datagrams
    refused.
    """
    for _ in range(count):
        with suppress(OSError):
            client.send(b"?")


def without_udp(published: list[Manifest]) -> list[Manifest]:
    """Return the Service without its UDP port; its endpoints are the same."""
    service, *slices = published
    service["spec"]["ports"] = [it for it in service["spec"]["ports"] if it["protocol"] != "UDP"]
    return [service, *slices]


def change(two: TwoNodes, pod: Host, how: str) -> None:
    if how == "a frontend goes":  # first, and then the endpoint
        two.publish(two.service("web", NUMBER, pod, type="ClusterIP", externalIPs=[]))
    match how:
        case "a port goes":
            two.publish(without_udp(two.service("web", NUMBER, pod)))
        case "the Service goes":
            two.publish()
        case _:
            two.publish(two.service("web", NUMBER))


LOSSES = ["the last endpoint goes", "the Service goes", "a port goes"]
clients = pytest.mark.parametrize(
    ("who", "kind", "how"),
    [
        *(("outside", "nodeport", how) for how in [*LOSSES, "a frontend goes"]),
        *((who, "cluster", how) for who in ("hooked", "near", "unhooked") for how in LOSSES),
    ],
)


@families
@clients
def test_datagrams_never_reach_the_other_host(
    two: TwoNodes, place: Place, leaver: Host, who: str, kind: str, how: str, v6: bool
) -> None:
    """A connected socket's datagrams never reach the other host after the change."""
    where = FRONTENDS.to(kind, two.near, v6=v6)
    two.publish(two.service("web", NUMBER, leaver))
    with requests.udp_socket(two.sockets(getattr(two, who)), where[0]) as client:
        client.connect(where)
        client.send(b"?")
        assert requests.receive(client).name == leaver.name
        change(two, leaver, how)
        place.move(place.stranger, leaver)

        def is_over() -> bool:
            send(client)
            return not place.received()

        wait_until("nothing reaches the stranger", is_over)
        send(client)
        assert not place.received()


@contextmanager
def silent(pod: Host) -> Iterator[None]:
    """Let the pod answer no connection during the block."""
    drop = f"type filter hook input priority 0; tcp dport {TARGET} drop"
    pod.nft(f"table inet silent {{\nchain i {{\n{drop}\n}}\n}}\n")
    try:
        yield
    finally:
        pod.nft("delete table inet silent\n")


@families
@pytest.mark.parametrize(
    ("who", "kind"),
    [("outside", "nodeport"), ("unhooked", "cluster"), ("hooked", "cluster"), ("near", "cluster")],
)
def test_an_unanswered_connection_starts_again_at_another_endpoint(
    two: TwoNodes, place: Place, leaver: Host, who: str, kind: str, v6: bool
) -> None:
    """If the removed endpoint has not answered, a connection of packets starts again at another
    endpoint, and a socket's connection fails at once.
    """
    where = FRONTENDS.to(kind, two.near, v6=v6)
    two.publish(two.service("web", NUMBER, leaver))
    server = two.sockets(place.stranger).open(AF_INET6, SOCK_STREAM)
    with (
        server,
        silent(leaver),
        requests.tcp_socket(two.sockets(getattr(two, who)), where[0]) as client,
    ):
        server.bind(("::", TARGET))
        server.listen(5)
        server.settimeout(A_MOMENT)
        client.setblocking(False)
        assert client.connect_ex(where) == EINPROGRESS
        time.sleep(A_MOMENT)  # its SYN is there
        two.publish(two.service("web", NUMBER, two.here))
        client.settimeout(CALL_SECONDS)
        if who in ("hooked", "near"):
            with pytest.raises(ConnectionAbortedError):
                client.recv(64)
        else:
            assert traffic.read(client.recv(64))[0] == two.here.name
        place.move(place.stranger, leaver)
        with pytest.raises(TimeoutError):
            server.accept()
