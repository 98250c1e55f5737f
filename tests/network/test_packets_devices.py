# SPDX-License-Identifier: Apache-2.0
"""Devices and addresses that come and go, and devices that are left alone."""

import subprocess
import sys
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import TIMEOUT
from tests.network import asking, twonodes
from tests.network.asking import Ask
from tests.network.ground import TARGET
from tests.network.twonodes import PODS, TwoNodes, Ways

WAYS = Ways(10)
LATE = {False: "192.0.2.77", True: "fd02::77"}
A_MOMENT = 0.3  # seconds in which nothing may happen

families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
protocols = pytest.mark.parametrize("ask", [asking.tcp, asking.udp])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoNodes]:
    """NodePorts on every address of the nodes' segment."""
    options = (*PODS, "--nodeport-addresses", "192.0.2.0/24,fd02::/64")
    with twonodes.running(tmp_path_factory.mktemp("two"), *options) as made:
        yield made


@pytest.fixture(autouse=True)
def service(two: TwoNodes) -> None:
    two.publish(two.service("web", 10, two.here, two.there))


@pytest.fixture(scope="module")
def late(two: TwoNodes) -> Host:
    """A hidden pod that comes when the agent has long been at work."""
    return two.lab.pod(two.near, "late", 50, hooked=False)


@families
@protocols
def test_late_client(two: TwoNodes, late: Host, ask: Ask, v6: bool) -> None:
    """A pod that comes later is served."""
    where = WAYS.to("cluster", two.near, v6=v6)
    until_served(two, late, where)
    assert asking.names(two.sockets(late), where[0], ask=ask).keys() == {"here", "there"}


def until_served(two: TwoNodes, host: Host, where: tuple[str, int]) -> None:
    wait_until(f"{host.name} is served", lambda: served(two, host, where))


def served(two: TwoNodes, host: Host, where: tuple[str, int], seconds: float = A_MOMENT) -> bool:
    """Whether somebody answers one datagram in so many seconds."""
    with asking.datagram(two.sockets(host), where[0]) as client:
        client.settimeout(seconds)
        try:
            return bool(asking.again(client, *where).name)
        except (TimeoutError, ConnectionRefusedError):
            return False


@families
@protocols
def test_late_endpoint(two: TwoNodes, ask: Ask, v6: bool) -> None:
    """An endpoint that comes later serves outside clients and hidden pods."""
    name = f"late-{ask.__name__}-{v6:d}"
    pod = two.lab.pod(two.near, name, 60 + 2 * v6 + (ask is asking.udp))
    two.begin(pod, "serve", pod.name, str(TARGET))
    two.publish(two.service("web", 10, pod))
    for who, kind in ((two.outside, "nodeport"), (two.hidden, "cluster")):
        where = WAYS.to(kind, two.near, v6=v6)
        until_served(two, who, where)
        assert asking.names(two.sockets(who), where[0], ask=ask, port=where[1]).keys() == {name}


@families
@protocols
def test_new_address(two: TwoNodes, ask: Ask, v6: bool) -> None:
    """An address that the node gets serves NodePorts to outside, as long as it is there."""
    addresses, address = two.maps["node_addresses"], ip_address(LATE[v6])
    two.near.ip(f"address add {address} dev eth0")
    wait_until("the address is served", lambda: addresses.get(address) is not None)
    found = asking.names(two.sockets(two.outside), str(address), ask=ask, port=WAYS.nodeport)
    assert found.keys() == {"here", "there"}
    two.near.ip(f"address del {address} dev eth0")
    wait_until("it is served no more", lambda: addresses.get(address) is None)


def test_devices_left_alone(two: TwoNodes) -> None:
    """At devices that --devices excludes no packet is served; at the others all are."""
    agent = two.agents[0]
    agent.stop()
    agent.options = (*agent.options, "--devices", "!eth*")
    agent.start()
    assert served(two, two.hidden, WAYS.to("cluster", two.near), TIMEOUT)
    assert not served(two, two.outside, WAYS.to("nodeport", two.near))
    agent.stop()
    agent.options = agent.options[:-2]
    agent.start()
    assert served(two, two.outside, WAYS.to("nodeport", two.near), TIMEOUT)


def test_cleanup(two: TwoNodes) -> None:
    """After `ebpflb cleanup` no packet is served, and a new agent serves all as before."""
    agent = two.agents[0]
    agent.stop()
    command = [sys.executable, "-m", "ebpflb", "cleanup", *agent.where]
    subprocess.run(command, check=True, capture_output=True)
    assert not served(two, two.outside, WAYS.to("nodeport", two.near))
    assert not served(two, two.hidden, WAYS.to("cluster", two.near))
    two.forget_maps()
    agent.start()
    assert served(two, two.outside, WAYS.to("nodeport", two.near), TIMEOUT)
