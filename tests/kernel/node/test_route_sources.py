# SPDX-License-Identifier: Apache-2.0
"""The listed sources equal the kernel's choice, for any destination beyond a device."""

import os
import random
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from queue import SimpleQueue

import pytest
from pyroute2 import netns
from pyroute2.iproute import IPRoute

from ebpflb.kernel.node.device_watch import DevicesChanged, DeviceWatch, list_devices
from ebpflb.lab.netns import ip as run_ip
from ebpflb.model.addresses import Address
from ebpflb.model.events import SourceStatus
from ebpflb.model.route_sources import RouteSource

NAME = f"ebpflb-test-{os.getpid()}-routes"
WAIT_SECONDS = 60.0
SETUP = """
link set lo up
link add d0 type veth peer name d1
link set d0 up addrgenmode none
link set d1 up addrgenmode none
address add 10.1.0.1/24 dev d0
address add 10.2.0.1/24 dev d0
route add default via 10.1.0.9
route add 10.50.0.0/16 via 10.2.0.9
route add 10.50.7.0/24 via 10.1.0.9
route add 10.60.0.0/16 via 10.1.0.9 src 10.2.0.1
address add fd00:1::1/64 dev d0 nodad
address add 2001:db8:1::1/64 dev d0 nodad
address add 2a00:5::1/64 dev d0 nodad
address add 2a00:6::1/64 dev d0 nodad preferred_lft 0
route add default via 2001:db8:1::9
route add 2001:db8:99::/48 via fd00:1::9 src fd00:1::1
route add fd00:77::/32 via 2001:db8:1::9
"""


@pytest.fixture
def namespace() -> Iterator[None]:
    """A namespace with this thread; its device d0 has several addresses and routes."""
    run_ip("netns", "add", NAME)
    netns.pushns(NAME)
    try:
        subprocess.run(["ip", "-batch", "-"], input=SETUP, text=True, check=True)
        yield
    finally:
        netns.popns()
        netns.remove(NAME)


def listed() -> dict[str, tuple[RouteSource, ...]]:
    found = list_devices(route_sources=True)
    return {
        device.name: tuple(s for s in found.route_sources if s.ifindex == device.index)
        for device in found.devices
    }


def longest(sources: tuple[RouteSource, ...], destination: Address) -> Address:
    """Return the source that a program would find."""
    matching = [each for each in sources if destination in each.network]
    return max(matching, key=lambda each: each.network.prefixlen).source


def kernel(destination: Address) -> Address:
    """Return the kernel's source for a packet to this destination by device d0."""
    with IPRoute() as route:
        (ifindex,) = route.link_lookup(ifname="d0")
        (answer,) = route.route("get", dst=str(destination), oif=ifindex)
        return ip_address(answer.get_attr("RTA_PREFSRC"))


def destinations() -> Iterator[Address]:
    drawn = random.Random(7)
    for _ in range(60):
        low = drawn.getrandbits(16) + 2
        yield IPv4Address((10 << 24) + (drawn.choice((50, 60, 70)) << 16) + low)
        yield IPv4Address((10 << 24) + (50 << 16) + (7 << 8) + low % 250 + 2)
        yield IPv4Address(drawn.randrange(20 << 24, 120 << 24))
        for prefix in (
            "fd00:",
            "fd00:77:",
            "2001:db8:",
            "2001:db8:99:",
            "2a00:5:",
            "2a00:",
            "2400:",
        ):
            yield IPv6Address(f"{prefix}{low:x}::{low:x}")
        yield IPv6Address((drawn.getrandbits(125)) | 1 << 125)


@pytest.mark.usefixtures("namespace")
def test_listed_sources_are_the_kernels() -> None:
    """The sources follow ``src``, the next hop, the label and the longest prefix.

    They are never deprecated.
    """
    sources = listed()["d0"]
    for destination in destinations():
        assert longest(sources, destination) == kernel(destination), destination


@pytest.mark.usefixtures("namespace")
def test_devices_without_a_choice_have_none() -> None:
    """A device with one address in each family needs no entry."""
    subprocess.run(["ip", "address", "add", "10.9.0.1/24", "dev", "d1"], check=True)
    assert listed()["d1"] == ()


@pytest.mark.usefixtures("namespace")
def test_changed_routes_are_emitted() -> None:
    """A route that is added, with a source of its own, leads to a new list."""
    emitted: SimpleQueue[DevicesChanged | SourceStatus] = SimpleQueue()
    DeviceWatch(emitted.put, route_sources=True).start()
    add = "route add 10.61.0.0/16 via 10.1.0.9 src 10.2.0.1"
    subprocess.run(["ip", *add.split()], check=True)
    while True:
        found = emitted.get(timeout=WAIT_SECONDS)
        assert isinstance(found, DevicesChanged)
        if any(str(each.network) == "10.61.0.0/16" for each in found.route_sources):
            break
