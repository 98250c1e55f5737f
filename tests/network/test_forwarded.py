# SPDX-License-Identifier: Apache-2.0
"""A node that is a router too: connections that it only forwards, in and out by one device."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.packet_path import Engine
from tests.kernel.node import nodes
from tests.kit import requests
from tests.kit.cluster import EXTERNAL, PORT, Cluster, endpoint, web
from tests.kit.lab_cluster import started
from tests.kit.parameters import families
from tests.kit.sockets import Socket
from tests.kit.two_nodes import ENGINES, require

FAR = {False: "10.99.0.3", True: "fd99::3"}  # the customer's address, behind the node
EXTERNAL6 = "fd03:113::10"


class Routing(Cluster):
    """The customer and the host outside reach each other through the node's uplink."""

    def __init__(self, lab: Lab, folder: Path, engine: Engine) -> None:
        super().__init__(lab, folder, engine=engine)
        self.outside, self.customer = lab.outside("outside", 1), lab.node("customer", 3)
        self.start_program(self.outside, "serve", "outside", str(PORT))
        for v6, far in FAR.items():
            bits = 128 if v6 else 32
            node, outside, customer = (
                host.v6 if v6 else host.v4 for host in (self.node, self.outside, self.customer)
            )
            self.customer.ip(
                f"address add {far}/{bits} dev lo{' nodad' if v6 else ''}",
                f"route add {outside}/{bits} via {node} src {far}",
                f"route add {EXTERNAL6 if v6 else EXTERNAL}/{bits} via {node} src {far}",
            )
            self.node.ip(f"route add {far}/{bits} via {customer}")
            lab.router.lead(f"{far}/{bits}", node)
        for device in ("all", "eth0"):
            self.node.sysctl(f"net.ipv4.conf.{device}.send_redirects", 0)

    def forget(self) -> None:
        """The node knows no connection any more."""
        flows = self.maps["tcp_flows"]
        flows.delete([key for key, _ in flows.items()])
        with nodes.entered(self.node.netns):
            conntrack.delete(conntrack.connections(lambda *_: True))

    def address(self, host: Host, v6: bool) -> str:
        return host.v6 if v6 else host.v4


@pytest.fixture(params=ENGINES, ids=str)
def routing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Routing]:
    require(request.param)
    with started(lambda lab: Routing(lab, tmp_path, request.param)) as made:
        yield made


def serve(routing: Routing, *external: str) -> None:
    """The service with these external IPs; the node's pods are its endpoints."""
    v6 = [endpoint(pod, v6=True) for pod in routing.web]
    routing.publish(web(*map(endpoint, routing.web), v6=v6, externalIPs=list(external)))


def echo(client: Socket, sent: bytes) -> bytes:
    client.send(sent)
    answer: bytes = client.recv(64)
    return answer


@families
def test_goes_on(routing: Routing, v6: bool) -> None:
    """A connection to an address that becomes an external IP goes on; new ones are served."""
    where = routing.address(routing.outside, v6)
    with requests.tcp_socket(routing.sockets(routing.customer), where) as client:
        client.connect((where, PORT))
        assert client.recv(64).startswith(b"outside ")
        serve(routing, where)
        for word in (b"one", b"two", b"three"):
            assert echo(client, word) == word
        names = requests.backends(routing.sockets(routing.customer), where)
        assert names.keys() == {"web-1", "web-2", "web-3"}
        assert echo(client, b"still") == b"still"


@families
@pytest.mark.parametrize("routing", [Engine.FLOWS], indirect=True, ids=str)
def test_reset_finds_the_client(routing: Routing, v6: bool) -> None:
    """The reset of a connection that the node does not know any more goes to its client, although
    the packet was to go to another neighbour. With netfilter the connection goes on
    (test_netfilter_segments.py).
    """
    where = EXTERNAL6 if v6 else EXTERNAL
    serve(routing, where)
    with requests.tcp_socket(routing.sockets(routing.customer), where) as client:
        client.connect((where, PORT))
        assert client.recv(64).startswith(b"web-")
        routing.forget()
        client.send(b"lost")
        with pytest.raises(ConnectionResetError):
            client.recv(64)
