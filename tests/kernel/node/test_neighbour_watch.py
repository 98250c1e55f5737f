# SPDX-License-Identifier: Apache-2.0
"""The kernel's neighbours, in a network namespace of the test's own, with pods in further ones."""

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from queue import SimpleQueue
from typing import Any

import pytest
from pyroute2 import netns

from ebpflb.kernel.node.device_watch import list_devices
from ebpflb.kernel.node.neighbour_watch import NeighbourWatch
from ebpflb.lab.netns import ip as run_ip
from ebpflb.model.neighbours import LearnedPort, Neighbour, Neighbourhood

NAME = f"ebpflb-test-{os.getpid()}-neighbours"
POD = f"{NAME}-pod"
WAIT_SECONDS = 60.0
MAC, OTHER_MAC = "02:00:00:00:00:51", "02:00:00:00:00:52"
HOST = {"4": "10.61.0.5", "6": "fd00:61::5"}

Ip = Callable[[str], None]
families = pytest.mark.parametrize("family", ["4", "6"])


@pytest.fixture
def ip() -> Iterator[Ip]:
    """Runs ip(8) in a fresh namespace with two veths into a pod, a0 and b0; the thread is there."""

    def run(words: str) -> None:
        subprocess.run(["ip", "-n", NAME, *words.split()], check=True)

    for name in (NAME, POD):
        run_ip("netns", "add", name)
    netns.pushns(NAME)
    try:
        run("link set lo up")
        for device in ("a", "b"):
            run(f"link add {device}0 type veth peer name {device}1 netns {POD}")
            run(f"link set {device}0 addrgenmode none up")
            subprocess.run(["ip", "-n", POD, "link", "set", f"{device}1", "up"], check=True)
        yield run
    finally:
        netns.popns()
        for name in (NAME, POD):
            netns.remove(name)


@pytest.fixture
def emitted(ip: Ip) -> Iterator[SimpleQueue[Any]]:
    """Return the events of a NeighbourWatch."""
    queue: SimpleQueue[Any] = SimpleQueue()
    watch = NeighbourWatch(queue.put)
    watch.start()
    assert queue.get(timeout=WAIT_SECONDS) == Neighbourhood()
    yield queue
    watch.stop()


def becomes(queue: SimpleQueue[Any], wanted: Callable[[Neighbourhood], bool]) -> None:
    """An Empty ends the wait."""
    while not wanted(queue.get(timeout=WAIT_SECONDS)):
        pass


def only(*neighbours: Neighbour) -> Callable[[Neighbourhood], bool]:
    return lambda found: found.neighbours == frozenset(neighbours)


def index(name: str) -> int:
    return socket.if_nametoindex(name)


@families
def test_follows(ip: Ip, emitted: SimpleQueue[Any], family: str) -> None:
    """A neighbour counts while the kernel knows its MAC address and routes to it there."""
    host, here = HOST[family], index("a0")
    ip(f"-{family} route add {host} dev a0")
    ip(f"neighbour replace {host} lladdr {MAC} dev a0 nud reachable")
    becomes(emitted, only(Neighbour(ip_address(host), here, MAC)))
    ip(f"neighbour replace {host} lladdr {OTHER_MAC} dev a0 nud stale")
    becomes(emitted, only(Neighbour(ip_address(host), here, OTHER_MAC)))
    ip(f"neighbour replace {host} dev a0 nud failed")
    becomes(emitted, only())


@families
def test_a_route_that_moves(ip: Ip, emitted: SimpleQueue[Any], family: str) -> None:
    """Of an address that two devices have heard of the one counts to which the route leads, with
    the route's MTU; behind a gateway it is no neighbour.
    """
    host = HOST[family]
    ip(f"-{family} route add {host} dev a0")
    for device, mac in (("a0", MAC), ("b0", OTHER_MAC)):
        ip(f"neighbour replace {host} lladdr {mac} dev {device} nud permanent")
    becomes(emitted, only(Neighbour(ip_address(host), index("a0"), MAC)))
    ip(f"-{family} route replace {host} dev b0 mtu 1300")
    becomes(emitted, only(Neighbour(ip_address(host), index("b0"), OTHER_MAC, 1300)))
    gateway = HOST[family].replace("5", "9")
    ip(f"-{family} route replace {host} via {gateway} dev b0 onlink")
    becomes(emitted, only())
    ip(f"-{family} route del {host}")
    ip(f"-{family} route add {host} dev a0")
    becomes(emitted, only(Neighbour(ip_address(host), index("a0"), MAC)))


@families
def test_a_rule(ip: Ip, emitted: SimpleQueue[Any], family: str) -> None:
    """Routing rules count as the kernel's routes do."""
    host = HOST[family]
    ip(f"-{family} route add {host} dev a0")
    ip(f"neighbour replace {host} lladdr {MAC} dev a0 nud permanent")
    becomes(emitted, only(Neighbour(ip_address(host), index("a0"), MAC)))
    ip(f"-{family} rule add to {host} blackhole priority 9")
    becomes(emitted, only())
    ip(f"-{family} rule del to {host} blackhole priority 9")
    becomes(emitted, only(Neighbour(ip_address(host), index("a0"), MAC)))


@families
def test_a_device_that_goes(ip: Ip, emitted: SimpleQueue[Any], family: str) -> None:
    """Its neighbours go with it, removed or only taken down."""
    host = HOST[family]
    for end in ("link set a0 down", "link delete a0"):
        ip("link set a0 up")
        ip(f"-{family} route replace {host} dev a0")
        ip(f"neighbour replace {host} lladdr {MAC} dev a0 nud permanent")
        becomes(emitted, only(Neighbour(ip_address(host), index("a0"), MAC)))
        ip(end)
        becomes(emitted, only())


def test_ports_of_a_bridge(ip: Ip, emitted: SimpleQueue[Any]) -> None:
    """A MAC address is behind the port where the bridge has it; a port's own is not behind it."""
    ip("link add br0 type bridge")
    ip("link set br0 addrgenmode none up")
    for device in ("a0", "b0"):
        ip(f"link set {device} master br0")
    fdb = ["bridge", "-n", NAME, "fdb"]
    for device in ("a0", "b0"):
        subprocess.run([*fdb, "replace", MAC, "dev", device, "master", "static"], check=True)
        wanted = frozenset({LearnedPort(index("br0"), MAC, index(device))})
        becomes(emitted, lambda found, wanted=wanted: found.ports == wanted)  # type: ignore[misc]
    ip("link delete b0")
    becomes(emitted, lambda found: not found.ports)


def test_what_was_there_before(ip: Ip) -> None:
    """The first list has it."""
    ip(f"route add {HOST['4']} dev a0")
    ip(f"neighbour replace {HOST['4']} lladdr {MAC} dev a0 nud permanent")
    queue: SimpleQueue[Any] = SimpleQueue()
    watch = NeighbourWatch(queue.put)
    watch.start()
    first = queue.get(timeout=WAIT_SECONDS)
    watch.stop()
    assert first.neighbours == {Neighbour(ip_address(HOST["4"]), index("a0"), MAC)}


def test_devices_that_lead_into_pods(ip: Ip) -> None:
    """A veth does whose other end is in another namespace, if it is up and has no queue."""
    ip("link add c0 type veth peer name c1")
    ip("link set c0 up")
    ip("link add d0 type bridge")
    ip("link set d0 up")

    def leading() -> set[str]:
        return {device.name for device in list_devices().devices if device.leads_to_pod}

    assert leading() == {"a0", "b0"}
    ip("link set a0 down")
    assert leading() == {"b0"}
    subprocess.run(["tc", "qdisc", "add", "dev", "b0", "root", "pfifo"], check=True)
    assert leading() == set()
