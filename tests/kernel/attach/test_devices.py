# SPDX-License-Identifier: Apache-2.0
"""Packet programs at real devices, by tcx and by clsact: attached, replaced, removed."""

import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from ebpflb.errors import VerifierError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import tcx
from ebpflb.kernel.attach.device_programs import DevicePrograms, attached_devices, unpin_all
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs.loader import Program
from ebpflb.kernel.segment import checksum
from tests.kernel.attach import device_namespace
from tests.kernel.attach.device_namespace import ALL, DROP, NONE, Agent, At, Namespace, ids, pair
from tests.kernel.variants import eventually, needs_root, open_files
from tests.load import scaled

pytestmark = needs_root


def test_kernel_tells(ns: Namespace) -> None:
    """The probe for tcx attaches nothing to any device."""
    assert tcx.works() == (ns.tcx("v0") == NONE)


def test_a_second_update_writes_nothing(
    agent: Agent, ns: Namespace, at: At, packets: list[Program]
) -> None:
    """A second update writes nothing and leaves no descriptor open."""
    made = agent()
    made.update(ns.served())
    before = open_files()
    made.update(ns.served())
    assert open_files() == before
    assert at("v0") == ids(packets)


def test_same_place(agent: Agent, ns: Namespace, newer: list[Program], by: str) -> None:
    """When a program is replaced, the link, or the filter's position, stays the same, and so does
    the order of programs.
    """

    def place() -> object:
        if by == "tcx":
            return list(bpf.query_links(ns.index("v0"), tcx.TCX_HOOKS["ingress"]))
        return re.findall(r"pref \d+|handle \w+", ns.run("tc filter show dev v0 ingress"))

    agent().update(ns.served())
    before = place()
    assert before
    agent(newer).update(ns.served())
    assert place() == before


def frame(mac: bytes) -> bytes:
    """Return a UDP datagram from 192.0.2.2 to 192.0.2.1:9, with or without checksums."""
    ip = bytes.fromhex("4500001d00000000401100000a000000c0000201")
    ip = ip[:12] + bytes([192, 0, 2, 2]) + ip[16:]
    ip = ip[:10] + checksum(ip).to_bytes(2, "big") + ip[12:]
    return mac + bytes(6) + b"\x08\x00" + ip + bytes.fromhex("000900090009000078")


@pytest.fixture
def flood(ns: Namespace) -> Iterator[socket.socket]:
    """Return the host's socket, which receives datagrams via v0 without pause; it does not
    block.
    """
    for words in (
        "link set v0 nomaster",
        "link set v0 up",
        "link set w0 up",
        "address add 192.0.2.1/24 dev v0",
    ):
        ns.run(f"ip {words}")
    wire, v0 = (socket.socket(socket.AF_PACKET, socket.SOCK_RAW) for _ in range(2))
    wire.bind(("w0", 0))
    v0.bind(("v0", 0))
    end, datagram = threading.Event(), frame(v0.getsockname()[4])

    def send() -> None:
        while not end.is_set():
            wire.send(datagram)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as host, wire, v0:
        host.bind(("192.0.2.1", 9))
        host.settimeout(60)
        sender = threading.Thread(target=send)
        sender.start()
        try:
            yield host
        finally:
            end.set()
            sender.join()


def drained(host: socket.socket) -> int:
    """Remove the datagrams that wait in the socket; return how many there were."""
    host.setblocking(False)
    count = 0
    try:
        while True:
            host.recv(16)
            count += 1
    except BlockingIOError:
        return count


def test_no_gap(agent: Agent, ns: Namespace, flood: socket.socket) -> None:
    """While programs are replaced again and again, every packet meets a program."""
    assert flood.recv(16) == b"x"  # they do come
    generations = [pair(DROP), pair(DROP)]
    try:
        agent(generations[0]).update(ns.served("v0"))
        time.sleep(0.1)  # what had passed the hook before
        drained(flood)
        for turn in range(scaled(100)):
            agent(generations[turn % 2]).update(ns.served("v0"))
        assert drained(flood) == 0
    finally:
        for each in generations:
            device_namespace.close(each)


def test_devices_without_a_link_header_get_others(home: StateDir, ns: Namespace, by: str) -> None:
    """Devices without a link header get different programs, after all devices with one."""
    asked, programs = [], pair()

    def load(link_header: bool) -> list[Program]:
        asked.append(link_header)
        return programs

    DevicePrograms(home, load).update(ns.served())
    assert asked == 2 * [True, True, True, False]  # for egress, then for ingress
    device_namespace.close(programs)
    unpin_all(home)


def test_one_variant_fails(home: StateDir, ns: Namespace, packets: list[Program], by: str) -> None:
    """If the programs for a device cannot be loaded, the device is named and all others are
    served.
    """

    def load(link_header: bool) -> list[Program]:
        if not link_header:
            raise VerifierError("the verifier rejected program ingress")
        return packets

    failed = DevicePrograms(home, load).update(ns.served())
    assert failed == {"tun0": "the verifier rejected program ingress"}
    assert attached_devices(home)[by] == 3
    unpin_all(home)


def test_removal_takes_programs_and_qdisc_along(
    agent: Agent, ns: Namespace, home: StateDir, at: At
) -> None:
    """Removing the state directory removes our programs, and the qdisc that we created."""
    agent().update(ns.served())
    unpin_all(home)
    assert eventually(lambda: all(at(name) == NONE for name in ALL))
    assert not any(ns.has_clsact(name) for name in ALL)
