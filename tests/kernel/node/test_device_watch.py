# SPDX-License-Identifier: Apache-2.0
"""The machine's devices and addresses, in a network namespace of the test's own."""

import errno
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from ipaddress import ip_address
from queue import SimpleQueue
from typing import Any

import pytest
from pyroute2 import netns

from ebpflb.errors import NodeError
from ebpflb.kernel.netlink import dump
from ebpflb.kernel.node import device_watch
from ebpflb.kernel.node.device_watch import (
    DevicesChanged,
    DeviceTable,
    DeviceWatch,
    list_devices,
)
from ebpflb.lab.netns import ip as run_ip
from ebpflb.model.addresses import Address, Family
from ebpflb.model.devices import Device
from ebpflb.model.events import SourceStatus
from ebpflb.model.packet_path import SYSCTLS
from tests.kit import needs

NAME = f"ebpflb-test-{os.getpid()}-devices"
NEW_LINK, REMOVED_LINK, GET_ADDRESS = 16, 17, 22  # RTM_*
LOOPBACK = {ip_address("127.0.0.1"), ip_address("::1")}
WAIT_SECONDS = 60.0  # seconds that a change may take to be emitted

Ip = Callable[[str], None]


@pytest.fixture
def ip() -> Iterator[Ip]:
    """Run ip(8) in a new namespace with the device d0, which the test's thread has entered."""

    def run(words: str) -> None:
        subprocess.run(["ip", "-n", NAME, *words.split()], check=True)

    run_ip("netns", "add", NAME)
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
def emitted(ip: Ip) -> SimpleQueue[DevicesChanged]:
    """Return the events of a DeviceWatch."""
    queue: SimpleQueue[Any] = SimpleQueue()
    DeviceWatch(queue.put).start()
    return queue


def addresses(*texts: str) -> set[Address]:
    return LOOPBACK | {ip_address(text) for text in texts}


def emitted_at_last(queue: SimpleQueue[DevicesChanged], wanted: set[Address]) -> bool:
    """Whether this is emitted, after any other events; an Empty ends the wait."""
    while queue.get(timeout=WAIT_SECONDS).addresses != wanted:
        pass
    return True


def devices() -> dict[str, Device]:
    return {device.name: device for device in list_devices().devices}


def test_loopback_and_headerless_devices_are_recognized(ip: Ip) -> None:
    """Loopback is recognized, and so is a device whose packets have no Ethernet header; other
    devices have a MAC address.
    """
    ip("tuntap add tun0 mode tun")
    ip("link set d0 address 02:00:00:00:00:0a")
    found = devices()
    assert (found["d0"].mac, found["tun0"].mac) == ("02:00:00:00:00:0a", "")
    assert {name for name, device in found.items() if device.loopback} == {"lo"}
    assert {name for name, device in found.items() if not device.link_header} == {"tun0"}
    assert len({device.index for device in found.values()}) == 3


def test_a_port_knows_its_bridge(ip: Ip) -> None:
    ip("link add v0 type veth peer name w0")
    ip("link set v0 master d0")
    found = devices()
    assert found["v0"].master == found["d0"].index
    assert found["w0"].master == found["d0"].master == 0


def test_hairpin_mode(ip: Ip, emitted: SimpleQueue[DevicesChanged]) -> None:
    """The hairpin mode of a bridge's port is known, and its change is emitted if the port is up:
    otherwise the kernel sends no message.
    """
    ip("link add v0 type veth peer name w0")
    ip("link set v0 master d0 up")
    assert not devices()["v0"].hairpin
    ip("link set v0 type bridge_slave hairpin on")
    while not any(device.hairpin for device in emitted.get(timeout=WAIT_SECONDS).devices):
        pass
    assert [name for name, device in devices().items() if device.hairpin] == ["v0"]


@needs.bridge_netfilter
def test_plain_bridge(ip: Ip, emitted: SimpleQueue[DevicesChanged]) -> None:
    """A bridge is plain unless netfilter runs at its ports, by the bridge's own setting or by a
    sysctl of either family; each change is emitted, though no message reports a sysctl's.
    """

    def until(is_plain: bool) -> None:
        """Wait for this value; an Empty ends the wait."""
        assert devices()["d0"].plain_bridge == is_plain
        while emitted.get(timeout=WAIT_SECONDS).devices[-1].plain_bridge != is_plain:
            pass

    for sysctl in SYSCTLS.values():
        run_ip("netns", "exec", NAME, "sysctl", "-qw", f"{sysctl}=0")
    until(is_plain=True)
    for family in ("iptables", "ip6tables"):
        ip(f"link set d0 type bridge nf_call_{family} 1")
        until(is_plain=False)
        ip(f"link set d0 type bridge nf_call_{family} 0")
        until(is_plain=True)
    for sysctl in SYSCTLS.values():
        run_ip("netns", "exec", NAME, "sysctl", "-qw", f"{sysctl}=1")
        until(is_plain=False)
        run_ip("netns", "exec", NAME, "sysctl", "-qw", f"{sysctl}=0")
        until(is_plain=True)
    assert not devices()["lo"].plain_bridge


def test_vlan_filtering_is_not_plain(ip: Ip) -> None:
    """A port of a bridge that filters VLANs may see frames without the tag that the bridge sees."""
    if not filters_vlans(ip):
        pytest.skip("bridges of this kernel do not filter by VLAN")
    assert not devices()["d0"].plain_bridge


def filters_vlans(ip: Ip) -> bool:
    """Let the bridge filter by VLAN; return whether it does."""
    with suppress(subprocess.CalledProcessError):
        ip("link set d0 type bridge vlan_filtering 1")
        return True
    return False


def test_how_often_bridge_settings_are_polled(ip: Ip, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sysctls are read often while a bridge may be served instead of its port, rarely with
    other bridges, and never without bridges.
    """

    def seconds() -> float:
        table = DeviceTable()
        table.read()
        return table.poll_seconds

    called = dict.fromkeys(Family, False)
    monkeypatch.setattr(device_watch, "bridge_calls", lambda: called)
    rarely = seconds()
    ip("link add up0 type vxlan id 1 remote 192.0.2.9 dstport 4789")
    ip("link set up0 master d0")
    often = seconds()
    called[Family.IPV6] = True
    assert seconds() == rarely
    ip("link del d0")
    assert often < rarely < seconds() == math.inf


def test_sources_are_in_the_kernels_order(ip: Ip) -> None:
    """The sources are the global, primary, usable addresses, in the order in which the kernel
    chooses them.
    """
    for address in ("169.254.1.1/16 scope link", "192.0.2.1/24", "192.0.2.2/24", "198.51.100.1/24"):
        ip(f"address add {address} dev d0")
    ip("address add 2001:db8::1/64 dev d0 nodad preferred_lft 0")
    ip("address add 2001:db8::2/64 dev d0 nodad")
    ip("address add fe80::1/64 dev d0 nodad")
    sources = ["192.0.2.1", "198.51.100.1", "2001:db8::2"]
    assert devices()["d0"].sources == tuple(map(ip_address, sources))
    assert not devices()["lo"].sources


def test_peers_are_not_ours(ip: Ip) -> None:
    """On a point-to-point link our own address counts, never the peer's."""
    ip("address add 192.0.2.1 peer 192.0.2.9 dev d0")
    ip("address add 2001:db8::1 peer 2001:db8::9 dev d0 nodad")
    assert list_devices().addresses == addresses("192.0.2.1", "2001:db8::1")


def test_device_goes(ip: Ip, emitted: SimpleQueue[DevicesChanged]) -> None:
    """The addresses of a removed device are gone too."""
    ip("address add 192.0.2.1/24 dev d0")
    assert emitted_at_last(emitted, addresses("192.0.2.1"))
    ip("link del d0")
    assert emitted_at_last(emitted, addresses())


def test_a_device_that_looks_like_a_removed_one(
    ip: Ip, emitted: SimpleQueue[DevicesChanged]
) -> None:
    """The new device has another index, so it gets programs; all others keep theirs."""

    def numbers() -> dict[str, int]:
        return {device.name: device.number for device in emitted.get(timeout=WAIT_SECONDS).devices}

    words = "link add like index 77 address 02:00:00:00:00:77 type bridge"
    ip(words)
    while "like" not in (before := numbers()):
        pass
    ip("link del like")
    ip(words)
    while (after := numbers()).get("like") in (before["like"], None):
        pass
    assert after | {"like": 0} == before | {"like": 0}


def test_a_change_asks_for_no_other_device(
    ip: Ip, emitted: SimpleQueue[DevicesChanged], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only devices in the kernel's messages are listed again, or only their addresses."""
    listed: list[tuple[int, int, int]] = []

    def noted(kind: int, content: bytes, *, strict: bool = False) -> list[bytes]:
        index = int.from_bytes(content[4:8], sys.byteorder) if strict else 0
        found = dump(kind, content, strict=strict)
        listed.append((kind, index, len(found)))
        return found

    index = devices()["d0"].index
    monkeypatch.setattr("ebpflb.kernel.netlink.dump", noted)
    ip("address add 192.0.2.1/24 dev d0")
    assert emitted_at_last(emitted, addresses("192.0.2.1"))
    assert set(listed) == {(GET_ADDRESS, index, 1)}


def test_a_device_is_removed_between_two_questions(ip: Ip, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing fails if a device is gone when its addresses are read; an event about its removal
    follows.
    """
    table = DeviceTable()
    table.read()
    ip("link add d1 type bridge")
    about = struct.pack("=4xI8x", devices()["d1"].index)

    def removed_before(kind: int, content: bytes, *, strict: bool) -> list[bytes]:
        ip("link del d1")
        return dump(kind, content, strict=strict)

    table.note([(NEW_LINK, about)])
    with monkeypatch.context() as patched:
        patched.setattr("ebpflb.kernel.netlink.dump", removed_before)
        assert [each.name for each in table.read().devices] == ["lo", "d0", "d1"]
    table.note([(REMOVED_LINK, about)])
    assert [each.name for each in table.read().devices] == ["lo", "d0"]


def test_goes_on(ip: Ip, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed list is reported, and tried again until it succeeds, also without another change."""
    emitted: SimpleQueue[DevicesChanged | SourceStatus] = SimpleQueue()
    refusals: list[Exception] = []
    others = set(threading.enumerate())  # watches of earlier tests are refused nothing

    def refused(kind: int, content: bytes, *, strict: bool = False) -> list[bytes]:
        if refusals and threading.current_thread() not in others:
            raise refusals.pop()
        return dump(kind, content, strict=strict)

    monkeypatch.setattr("ebpflb.kernel.node.device_watch.RELIST_SECONDS", 0.01)
    monkeypatch.setattr("ebpflb.kernel.netlink.dump", refused)
    DeviceWatch(emitted.put).start()
    ip("address add 192.0.2.1/24 dev d0")
    refusals += [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)),
    ]
    ip("link set d0 mtu 1400")
    while isinstance(first := emitted.get(timeout=WAIT_SECONDS), DevicesChanged):
        pass
    assert first == SourceStatus("devices", "devices cannot be listed: No buffer space available")
    second = SourceStatus("devices", "devices cannot be listed: Too many open files")
    assert emitted.get(timeout=WAIT_SECONDS) == second
    now = emitted.get(timeout=WAIT_SECONDS)
    assert isinstance(now, DevicesChanged)
    assert now.addresses == addresses("192.0.2.1")
    assert emitted.get(timeout=WAIT_SECONDS) == SourceStatus("devices", None)


def test_start_refused(ip: Ip, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that cannot list the devices at the start reports this, and does not guess."""
    monkeypatch.setattr("ebpflb.kernel.netlink.dump", lambda *_: os.open("/nowhere", os.O_RDONLY))
    with pytest.raises(NodeError, match="devices cannot be listed: No such file"):
        DeviceWatch(lambda _: None).start()


def test_ipvs_device(ip: Ip) -> None:
    """The device of kube-proxy's ipvs mode holds cluster IPs: none of these is an address of the
    node. It is known whether it is there.
    """
    ip("link add kube-ipvs0 type bridge")
    ip("address add 10.96.0.10 dev kube-ipvs0")
    assert list_devices().addresses == addresses()
    assert "kube-ipvs0" not in devices()
    assert list_devices().has_ipvs
    ip("link delete kube-ipvs0")
    assert not list_devices().has_ipvs
