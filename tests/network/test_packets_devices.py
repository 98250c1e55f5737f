# SPDX-License-Identifier: Apache-2.0
"""Devices and addresses that come and go, and devices that are left alone."""

from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import CALL_SECONDS
from tests.kit import forked, requests, two_nodes
from tests.kit.lab_cluster import TARGET
from tests.kit.requests import Send
from tests.kit.two_nodes import CLUSTER_CIDR, ENGINES, Frontends, TwoNodes

FRONTENDS = Frontends(10)
LATE = {False: "192.0.2.77", True: "fd02::77"}
A_MOMENT = 0.3  # seconds in which nothing may happen

families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
protocols = pytest.mark.parametrize("send", [requests.tcp, requests.udp])


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TwoNodes]:
    """NodePorts on every address of the nodes' segment."""
    options = (*CLUSTER_CIDR, "--nodeport-addresses", "192.0.2.0/24,fd02::/64")
    two_nodes.require(request.param)
    folder = tmp_path_factory.mktemp("two")
    with two_nodes.running(folder, *options, engine=request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def service(two: TwoNodes) -> None:
    two.publish(two.service("web", 10, two.here, two.there))


@pytest.fixture(scope="module")
def late(two: TwoNodes) -> Host:
    """An unhooked pod that comes when the agent has long been at work."""
    return two.lab.pod(two.near, "late", 50, hooked=False)


@pytest.mark.extended
@families
@protocols
def test_late_client(two: TwoNodes, late: Host, send: Send, v6: bool) -> None:
    """A pod that comes later is served."""
    where = FRONTENDS.to("cluster", two.near, v6=v6)
    until_served(two, late, where)
    assert requests.backends(two.sockets(late), where[0], send=send).keys() == {"here", "there"}


def until_served(two: TwoNodes, host: Host, where: tuple[str, int]) -> None:
    wait_until(f"{host.name} is served", lambda: served(two, host, where))


def served(two: TwoNodes, host: Host, where: tuple[str, int], seconds: float = A_MOMENT) -> bool:
    """Whether somebody answers one datagram in so many seconds."""
    with requests.udp_socket(two.sockets(host), where[0]) as client:
        client.settimeout(seconds)
        try:
            return bool(requests.exchange(client, *where).name)
        except (TimeoutError, ConnectionRefusedError):
            return False


@families
@protocols
def test_late_endpoint(two: TwoNodes, send: Send, v6: bool) -> None:
    """An endpoint that comes later serves outside clients and unhooked pods."""
    name = f"late-{send.__name__}-{v6:d}"
    pod = two.lab.pod(two.near, name, 60 + 2 * v6 + (send is requests.udp))
    two.start_program(pod, "serve", pod.name, str(TARGET))
    two.publish(two.service("web", 10, pod))
    for who, kind in ((two.outside, "nodeport"), (two.unhooked, "cluster")):
        where = FRONTENDS.to(kind, two.near, v6=v6)
        until_served(two, who, where)
        assert requests.backends(two.sockets(who), where[0], send=send, port=where[1]).keys() == {
            name
        }


@families
@protocols
def test_new_address(two: TwoNodes, send: Send, v6: bool) -> None:
    """A new address of the node serves NodePorts to outside clients, as long as it exists."""
    addresses, address = two.maps["node_addresses"], ip_address(LATE[v6])
    two.near.ip(f"address add {address} dev eth0")
    wait_until("the address is served", lambda: addresses.get(address) is not None)
    found = requests.backends(
        two.sockets(two.outside), str(address), send=send, port=FRONTENDS.nodeport
    )
    assert found.keys() == {"here", "there"}
    two.near.ip(f"address del {address} dev eth0")
    wait_until("it is served no more", lambda: addresses.get(address) is None)


@pytest.mark.extended
def test_devices_left_alone(two: TwoNodes) -> None:
    """At devices that --devices excludes no packet is served; at the others all are."""
    agent = two.agents[0]
    agent.stop()
    agent.options = (*agent.options, "--devices", "!eth*")
    agent.start()
    assert served(two, two.unhooked, FRONTENDS.to("cluster", two.near), CALL_SECONDS)
    assert not served(two, two.outside, FRONTENDS.to("nodeport", two.near))
    agent.stop()
    agent.options = agent.options[:-2]
    agent.start()
    assert served(two, two.outside, FRONTENDS.to("nodeport", two.near), CALL_SECONDS)


def test_cleanup(two: TwoNodes) -> None:
    """After `ebpflb cleanup` no packet is served, and a new agent serves all as before."""
    agent = two.agents[0]
    agent.stop()
    forked.run("cleanup", *agent.where).check_returncode()
    assert not served(two, two.outside, FRONTENDS.to("nodeport", two.near))
    assert not served(two, two.unhooked, FRONTENDS.to("cluster", two.near))
    two.close_maps()
    agent.start()
    assert served(two, two.outside, FRONTENDS.to("nodeport", two.near), CALL_SECONDS)
