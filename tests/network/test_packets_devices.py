# SPDX-License-Identifier: Apache-2.0
"""Devices and addresses that are added and removed, and devices that are not served."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from tests.kit import requests, two_nodes
from tests.kit.parameters import families, protocols
from tests.kit.requests import Send
from tests.kit.two_nodes import Frontends, TwoNodes
from tests.load import scaled

FRONTENDS = Frontends(10)
LATE = {False: "192.0.2.77", True: "fd02::77"}
A_FIRST_SEGMENT = 0.5  # seconds in which the first segment is sent, and no other
DEVICES = scaled(60)  # pairs
PATIENCE = 10.0  # seconds; TCP sends again after 1, 3 and 7


two = two_nodes.fixture("--nodeport-addresses", "192.0.2.0/24,fd02::/64")


@pytest.fixture(autouse=True)
def service(two: TwoNodes) -> None:
    two.publish(two.service("web", 10, two.here, two.there))


@pytest.fixture(scope="module")
def late(two: TwoNodes) -> Host:
    """Add an unhooked pod after the agent has started."""
    return two.lab.pod(two.near, "late", 50, hooked=False)


@contextmanager
def stopped(agent: LabAgent) -> Iterator[None]:
    """Stop the agent during the block."""
    assert agent.process
    agent.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        agent.process.send_signal(signal.SIGCONT)


@pytest.mark.extended
@families
def test_a_pod_that_asks_before_its_device_is_served(two: TwoNodes, v6: bool) -> None:
    """A pod's connection opens when the pod sends its first segment again."""
    where = FRONTENDS.to("cluster", two.near, v6=v6)
    with stopped(two.agents[0]):
        pod = two.lab.pod(two.near, f"early-{v6:d}", 70 + v6, hooked=False)
        client = requests.tcp_socket(two.sockets(pod), where[0])
        client.settimeout(A_FIRST_SEGMENT)
        if two.engine is Engine.NETFILTER:
            with pytest.raises(OSError, match=r"timed out|in progress"):
                client.connect(where)
        else:  # the program at the bridge opens the flow; an endpoint at it answers past its device
            with suppress(TimeoutError):
                client.connect(where)
    with client:
        client.settimeout(PATIENCE)
        assert client.recv(64)


def test_devices_that_come_and_go_fail_no_connection(two: TwoNodes) -> None:
    """Dozens of devices change at once while clients at other devices connect without pause."""
    pods = [FRONTENDS.to("cluster", two.near, v6=v6) for v6 in (False, True)]
    clients = [two.start_client(two.unhooked, "tcp", *where) for where in pods]
    nodeport = FRONTENDS.to("nodeport", two.near)
    clients.append(two.start_client(two.outside, "tcp", *nodeport))
    names = [f"brief{number}" for number in range(DEVICES)]
    before = len(list(two.maps["devices"].items()))
    two.near.ip(*(f"link add {name} up type veth peer name {name}b" for name in names))
    wait_until(
        "they are served", lambda: len(list(two.maps["devices"].items())) >= before + 2 * DEVICES
    )
    two.near.ip(*(f"link del {name}" for name in names))
    for client in clients:
        assert two.stop_client(client)["errors"] == {}


@families
@protocols
def test_new_address(two: TwoNodes, send: Send, v6: bool) -> None:
    """A new address of the node serves NodePorts to outside clients and pods while it exists."""
    addresses, address = two.maps["node_addresses"], ip_address(LATE[v6])
    two.near.ip(f"address add {address} dev eth0")
    wait_until("the address is served", lambda: addresses.get(address) is not None)
    for host in (two.outside, two.hooked):
        how: dict[str, Any] = {"send": send, "port": FRONTENDS.nodeport}
        found = requests.backends(two.sockets(host), str(address), **how)
        assert found.keys() == {"here", "there"}
    two.near.ip(f"address del {address} dev eth0")
    wait_until("it is served no more", lambda: addresses.get(address) is None)
