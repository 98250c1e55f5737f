# SPDX-License-Identifier: Apache-2.0
"""Frames for another host's MAC address, as a device in promiscuous mode or a bridge gets them.

A switch that does not know where that host is sends them everywhere, and a mirror port always. The
stack drops them before netfilter; a bridge passes them on.
"""

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from socket import SO_ERROR, SOL_SOCKET

import pytest

from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab.hosts import Host
from ebpflb.lab.router import NODES
from tests.kernel.node import nodes
from tests.kit import requests, two_nodes
from tests.kit.lab_cluster import PORT
from tests.kit.parameters import families, protocols
from tests.kit.requests import Send
from tests.kit.sockets import Socket
from tests.kit.two_nodes import Frontends, TwoNodes, address

WEB, NOBODY, LOCAL = 10, 20, 30
SERVICES = {"served": WEB, "without endpoints": NOBODY}
FLOWS = ("tcp_flows", "other_flows")
ELSEWHERE, MACVLAN = "02:00:00:00:00:99", "02:00:00:00:00:88"
OWN = {False: "192.0.2.88", True: "fd02::88"}  # of the macvlan device

kinds = pytest.mark.parametrize("kind", ["nodeport", "cluster"])


def publish(two: TwoNodes) -> None:
    """Uplinks take whatever the switch sends."""
    for node in (two.near, two.far):
        node.ip("link set eth0 promisc on")
    two.publish(
        two.service("web", WEB, two.here, two.there),
        two.service("no", NOBODY),
        two.service("local", LOCAL, two.there, externalTrafficPolicy="Local"),
    )


# NodePorts on every address of the segment.
two = two_nodes.fixture("--nodeport-addresses", ",".join(NODES.networks), publish=publish)


@contextmanager
def sent_to(two: TwoNodes, place: str, mac: str) -> Iterator[None]:
    """The router takes this MAC address for that of a host of the nodes' segment."""
    where = f"{place} dev {NODES.name}"
    two.lab.router.ip(f"neighbour replace {where} lladdr {mac} nud permanent")
    try:
        yield
    finally:
        two.lab.router.ip(f"neighbour del {where}")


def known_ports(two: TwoNodes) -> set[int]:
    """The clients' ports of all flows, of either engine, on both nodes."""
    tables = [two.maps_of(agent)[name] for agent in two.agents for name in FLOWS]
    ports = {key.source_port for table in tables for key, _ in table.items()}
    for node in (two.near, two.far):
        with nodes.entered(node.netns):
            ports |= {e.original.source_port for e in conntrack.connections(lambda *_: True)}
    return ports


def asking(two: TwoNodes, where: tuple[str, int], opened: ExitStack) -> tuple[Socket, Socket]:
    """A TCP socket whose SYN has been sent, and a UDP socket whose datagram has."""
    sockets = two.sockets(two.outside)
    stream = opened.enter_context(requests.tcp_socket(sockets, where[0]))
    datagrams = opened.enter_context(requests.udp_socket(sockets, where[0]))
    for each in (stream, datagrams):
        each.settimeout(0)
    assert stream.connect_ex(where) == errno.EINPROGRESS
    datagrams.connect(where)
    datagrams.send(b"?")
    return stream, datagrams


@families
@kinds
@pytest.mark.parametrize("service", SERVICES)
def test_frames_for_another_host_are_left_alone(
    two: TwoNodes, service: str, kind: str, v6: bool
) -> None:
    """They open no flow and nobody answers or refuses them; other frames are served meanwhile."""
    where = Frontends(SERVICES[service]).to(kind, two.near, v6=v6)
    with sent_to(two, address(two.near, where[0]), ELSEWHERE), ExitStack() as opened:
        stream, datagrams = asking(two, where, opened)
        other_family = Frontends(WEB).to(kind, two.near, v6=not v6)
        assert requests.udp(two.sockets(two.outside), *other_family).name in {"here", "there"}
        assert stream.getsockopt(SOL_SOCKET, SO_ERROR) == 0
        with pytest.raises(BlockingIOError):
            datagrams.recv(64)
        ours = {each.getsockname()[1] for each in (stream, datagrams)}
        assert not ours & known_ports(two)


@pytest.fixture(scope="module")
def machine(two: TwoNodes) -> Host:
    """On the bridge of near's pods, as a virtual machine is: it has addresses that are frontends'
    too, and the pod "unhooked" knows it for the next hop there.
    """
    machine = two.lab.pod(two.near, "machine", 20, hooked=False)
    for number in (WEB, NOBODY, LOCAL):
        for place in Frontends(number).balancer:
            machine.ip(f"address add {place} dev lo")
            two.unhooked.ip(f"route add {place} via {address(machine, place)}")
    two.start_program(machine, "serve", machine.name, str(PORT))
    return machine


@families
@protocols
@pytest.mark.parametrize("number", [WEB, NOBODY, LOCAL], ids=["served", "no endpoint", "local"])
def test_frames_that_a_bridge_passes_on_are_left_alone(
    two: TwoNodes, machine: Host, number: int, send: Send, v6: bool
) -> None:
    """They reach the machine that they are for, whatever this node would do at that frontend."""
    where = Frontends(number).to("balancer", two.near, v6=v6)
    answer = send(two.sockets(two.unhooked), *where)
    assert answer.name == machine.name
    assert answer.source == address(two.unhooked, where[0])


@pytest.fixture
def macvlan(two: TwoNodes) -> Iterator[None]:
    """A device above near's uplink with a MAC address of its own, as VRRP has it."""
    two.near.ip(f"link add own link eth0 address {MACVLAN} type macvlan mode bridge")
    two.near.sysctl("net.ipv4.conf.own.rp_filter", 0)
    two.near.ip("link set own up", *(f"address add {place} dev own" for place in OWN.values()))
    yield
    two.near.ip("link del own")


@families
@protocols
@pytest.mark.usefixtures("macvlan")
def test_device_above_the_uplink(two: TwoNodes, send: Send, v6: bool) -> None:
    """What is for a macvlan device of the node is served there."""
    where = OWN[v6], Frontends(WEB).nodeport
    with sent_to(two, OWN[v6], MACVLAN):
        two.until_served(two.outside, where)  # the device is new to the agent
        answer = send(two.sockets(two.outside), *where)
        assert answer.name in {"here", "there"}
