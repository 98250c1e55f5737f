# SPDX-License-Identifier: Apache-2.0
"""Devices that are added, removed, moved away, or get the index of another one."""

import errno
from pathlib import Path

import pytest
from msgspec.structs import replace
from pyroute2 import netns

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import tcx
from ebpflb.kernel.attach.clsact import Clsact
from ebpflb.kernel.attach.device_programs import DevicePrograms, attached_devices
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs.loader import Program
from ebpflb.lab.netns import ip as run_ip
from tests.kernel.attach.device_namespace import (
    ALL,
    HOOKS,
    NONE,
    Agent,
    At,
    Namespace,
    home_of,
    ids,
)
from tests.kernel.variants import eventually, needs_root

pytestmark = needs_root
Said = pytest.LogCaptureFixture


@pytest.fixture
def said(caplog: Said) -> Said:
    caplog.set_level("WARNING")
    return caplog


def test_device_goes(agent: Agent, ns: Namespace) -> None:
    """No record of a removed device is kept."""
    made = agent()
    ns.run("ip link add late index 77 type bridge")
    made.update(ns.served())
    ns.run("ip link del late")
    made.update(ns.served())
    assert not list(home_of(made).devices_directory.glob("77-*"))


def test_a_pod_costs_no_list(
    agent: Agent, ns: Namespace, at: At, packets: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cost of a new device does not grow with the number of devices: no record and no pin of
    another one is read.
    """
    made = agent()
    made.update(ns.served())
    looked: list[int] = []
    real = made.attacher.pins

    def pins(index: int, *hooks: tuple[str, ...]) -> list[Path]:
        looked.append(index)
        return real(index, *hooks)

    monkeypatch.setattr(made.attacher, "recorded", lambda: 1 / 0)
    monkeypatch.setattr(made.attacher, "pins", pins)
    ns.run("ip link add late index 77 type bridge")
    made.update(ns.served())
    assert at("late") == ids(packets)
    ns.run("ip link del late")
    made.update(ns.served())
    assert set(looked) == {77}
    assert not list(home_of(made).devices_directory.glob("77-*"))


def test_device_goes_meanwhile(
    home: StateDir, ns: Namespace, packets: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is removed while its filters are listed is not an error."""
    made = Clsact(home.devices_directory)
    made.attach(ns.index("br0"), packets)

    def seen_last(*_: object) -> list[str]:
        if "br0" in ns.run("ip -br link"):
            ns.run("ip link del br0")
        return list(HOOKS)

    monkeypatch.setattr(Clsact, "hooks_at", seen_last)
    made.detach(made.recorded())
    assert not made.recorded()


def test_device_goes_at_once(agent: Agent, ns: Namespace) -> None:
    """A device that is removed before programs are attached is not an error."""
    made, found = agent(), ns.served()
    ns.run("ip link del br0")
    assert made.update(found) == {}


def take_off(ns: Namespace, made: DevicePrograms, by: str, whole: bool) -> None:
    """Detach programs as another agent may: everything at v0, or only our program at one hook."""
    if by == "clsact":
        ns.run("tc qdisc del dev v0 clsact" if whole else "tc filter del dev v0 ingress pref 2")
        return
    for end in ("ingress", "egress") if whole else ("ingress",):
        tcx.detach(home_of(made).devices_directory / f"{ns.index('v0')}-{end}")


@pytest.mark.parametrize("whole", [True, False], ids=["everything", "only ours"])
def test_taken_off(
    agent: Agent, ns: Namespace, at: At, by: str, packets: list[Program], whole: bool
) -> None:
    """Programs that other software removes do not count, and ``restore`` attaches them again."""
    made = agent()
    made.update(ns.served())
    take_off(ns, made, by, whole)
    assert eventually(lambda: at("v0") != ids(packets))
    assert attached_devices(home_of(made)) == {by: len(ALL) - 1}
    (found,) = filter(None, made.faults(ns.served()))
    assert {str(each.part) for each in found} >= {"device"}
    assert {each.name for each in found} == {"device v0"}
    assert made.restore(ns.served()) == {}
    assert not any(made.faults(ns.served()))
    assert at("v0") == ids(packets)
    assert attached_devices(home_of(made)) == {by: len(ALL)}


def test_a_program_without_its_pin_stays(
    agent: Agent, ns: Namespace, at: At, by: str, packets: list[Program], said: Said
) -> None:
    """A program that lost its pin, or the record of its filters, stays at its device while the
    agent runs, and is pinned again.
    """
    made, index = agent(), ns.index("v0")
    made.update(ns.served())
    links = [bpf.query_links(index, hook) for hook in tcx.TCX_HOOKS.values()] if by == "tcx" else []
    for kept in home_of(made).devices_directory.glob(f"{index}-*"):
        kept.rmdir() if kept.is_dir() else kept.unlink()
    (found,) = filter(None, made.faults(ns.served()))
    assert {str(each.part) for each in found} == {"pin"}
    made.held.restore()
    assert made.restore(ns.served()) == {}
    assert not any(made.faults(ns.served()))
    if by == "tcx":
        assert [bpf.query_links(index, hook) for hook in tcx.TCX_HOOKS.values()] == links
    assert at("v0") == ids(packets)
    assert not said.messages


def test_a_check_asks_once_for_each_program(
    agent: Agent, ns: Namespace, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking a device whose programs are in place takes one system call for each."""
    if by == "clsact":
        pytest.skip("filters are listed by netlink")
    made, calls = agent(), list[str]()
    made.update(ns.served())
    assert not any(made.faults(ns.served()))

    def counted(command: int, what: str, attr: object) -> int:
        calls.append(what)
        return call(command, what, attr)

    call = bpf.bpf
    monkeypatch.setattr(bpf, "bpf", counted)
    assert not any(made.faults(ns.served()))
    assert len(calls) == 2 * len(ns.served())


def test_replaced_program(
    agent: Agent, ns: Namespace, at: At, by: str, packets: list[Program], newer: list[Program]
) -> None:
    """If a link of ours runs another program, it gets our program again."""
    if by == "clsact":
        pytest.skip("filters are told by their names")
    made = agent()
    made.update(ns.served())
    tcx.Tcx(home_of(made).devices_directory).attach(ns.index("v0"), newer)
    (found,) = filter(None, made.faults(ns.served()))
    assert all("which is not the agent's" in each.found for each in found)
    assert made.restore(ns.served()) == {}
    assert at("v0") == ids(packets)


def test_a_device_that_looks_like_a_removed_one(
    agent: Agent, ns: Namespace, at: At, packets: list[Program]
) -> None:
    """The new device has another index, so it gets the programs too."""
    made, words = agent(), "ip link add late index 77 address 02:00:00:00:00:77 type bridge"
    ns.run(words)
    made.update(before := ns.served())
    ns.run("ip link del late")
    ns.run(words)
    made.update(tuple(replace(device, number=device.number + len(before)) for device in before))
    assert at("late") == ids(packets)


def test_no_descriptors(agent: Agent, ns: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """If devices cannot be listed, as without free descriptors, a KernelError is raised."""
    made = Clsact(home_of(agent()).devices_directory)

    def refused(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("ebpflb.kernel.netlink.socket.socket", refused)
    with pytest.raises(KernelError, match="clsact: Too many open files") as raised:
        made.attached()
    assert raised.value.errno == errno.EMFILE


def test_device_moves(agent: Agent, ns: Namespace, at: At, by: str) -> None:
    """A device that moves to a pod loses our programs; a device that takes its index gets them."""
    made, pod = agent(), Namespace(f"{ns.name}-pod")
    run_ip("netns", "add", pod.name)
    try:
        made.update(ns.served())
        index = ns.index("w0")
        ns.run(f"ip link set w0 netns {pod.name}")
        ns.run(f"ip link add w0 index {index} type bridge")
        assert at("w0") == NONE
        made.update(ns.served())
        assert set(map(len, at("w0").values())) == {1}
        netns.pushns(pod.name)
        try:
            there = pod.tcx if by == "tcx" else pod.filters
            assert eventually(lambda: there("w0") == NONE)
        finally:
            netns.popns()
    finally:
        netns.remove(pod.name)
