# SPDX-License-Identifier: Apache-2.0
"""The machine's addresses, in a network namespace of the test's own."""

import os
import subprocess
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from queue import SimpleQueue

import pytest
from pyroute2 import netns

from ebpflb.model.addresses import Address
from ebpflb.node.addresses import AddressesChanged, Follower, current

NAME = f"ebpflb-test-{os.getpid()}-addresses"
LOOPBACK = {ip_address("127.0.0.1"), ip_address("::1")}
PATIENCE = 10.0  # seconds that a change may take to be told

Ip = Callable[[str], None]


@pytest.fixture
def ip() -> Iterator[Ip]:
    """Runs ip(8) in a fresh namespace with the device d0, in which the test's thread is too."""

    def run(words: str) -> None:
        subprocess.run(["ip", "-n", NAME, *words.split()], check=True)

    netns.create(NAME)
    netns.pushns(NAME)
    try:
        run("link set lo up")
        run("link add d0 type bridge")
        run("link set d0 up")
        run("link set d0 addrgenmode none")
        run("address flush dev d0")
        yield run
    finally:
        netns.popns()
        netns.remove(NAME)


@pytest.fixture
def told(ip: Ip) -> SimpleQueue[AddressesChanged]:
    """What a follower tells."""
    queue: SimpleQueue[AddressesChanged] = SimpleQueue()
    Follower(queue.put).start()
    return queue


def addresses(*texts: str) -> set[Address]:
    return LOOPBACK | {ip_address(text) for text in texts}


def told_at_last(queue: SimpleQueue[AddressesChanged], wanted: set[Address]) -> bool:
    """Whether it is told, after whatever else; an Empty ends the wait."""
    while queue.get(timeout=PATIENCE).addresses != wanted:
        pass
    return True


def test_current(ip: Ip) -> None:
    """All addresses of both families, loopback too, without their prefixes."""
    ip("address add 192.0.2.1/24 dev d0")
    ip("address add 192.0.2.2/24 dev d0")
    ip("address add 2001:db8::1/64 dev d0 nodad")
    assert current() == addresses("192.0.2.1", "192.0.2.2", "2001:db8::1")


def test_peers_are_not_ours(ip: Ip) -> None:
    """On a point-to-point link our own address counts, never the other end's."""
    ip("address add 192.0.2.1 peer 192.0.2.9 dev d0")
    ip("address add 2001:db8::1 peer 2001:db8::9 dev d0 nodad")
    assert current() == addresses("192.0.2.1", "2001:db8::1")


def test_first(told: SimpleQueue[AddressesChanged]) -> None:
    """A follower tells at once what is there."""
    assert told.get_nowait().addresses == LOOPBACK


@pytest.mark.parametrize("address", ["192.0.2.1", "2001:db8::1"])
def test_follows(ip: Ip, told: SimpleQueue[AddressesChanged], address: str) -> None:
    """An address that comes and goes is told both times."""
    ip(f"address add {address} dev d0")
    assert told_at_last(told, addresses(address))
    ip(f"address del {address} dev d0")
    assert told_at_last(told, addresses())


def test_device_goes(ip: Ip, told: SimpleQueue[AddressesChanged]) -> None:
    """A device that goes takes its addresses with it."""
    ip("address add 192.0.2.1/24 dev d0")
    assert told_at_last(told, addresses("192.0.2.1"))
    ip("link del d0")
    assert told_at_last(told, addresses())
