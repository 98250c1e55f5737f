# SPDX-License-Identifier: Apache-2.0
"""Programs of other software at our devices are never changed, and are named with their place."""

import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from ebpflb.kernel import bpf
from ebpflb.kernel.attach import device_programs, tcx, uplink_program
from ebpflb.kernel.attach.clsact import Clsact
from ebpflb.kernel.attach.device_programs import (
    DevicePrograms,
    attached_devices,
    others_programs,
    unpin_all,
)
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs.loader import Program
from tests.kernel.attach import device_namespace
from tests.kernel.attach.device_namespace import (
    Agent,
    Namespace,
    has_tcx,
    ids,
    number,
    program,
    with_clsact,
)
from tests.kernel.variants import eventually, needs_root

pytestmark = needs_root


def test_remove_elsewhere(agent: Agent, ns: Namespace, home: StateDir, by: str) -> None:
    """A removal in another network namespace leaves devices with the same index there alone."""
    agent().update(ns.served())
    with device_namespace.entered(f"{ns.name}-2") as other:
        other_program = program("other_program")
        index = other.index("v0")
        assert index == ns.index("v0")
        with_clsact(other, "v0", other_program, priority=2)
        unpin_all(home)
        assert other.filters("v0") == {"ingress": [number(other_program)], "egress": []}
        device_namespace.close([other_program])


@pytest.mark.parametrize("priority", [1, 2, 3])
def test_foreign_filter(
    home: StateDir,
    ns: Namespace,
    by_clsact: None,
    other_program: Program,
    priority: int,
    packets: list[Program],
) -> None:
    """Another agent's filter and qdisc stay when our filters are attached and removed."""
    with_clsact(ns, "v0", other_program, priority=priority)
    DevicePrograms(home, lambda link_header: packets).update(ns.served())
    assert sorted(ns.filters("v0")["ingress"]) == sorted(
        [number(other_program), *ids(packets)["ingress"]]
    )
    unpin_all(home)
    assert ns.filters("v0") == {"ingress": [number(other_program)], "egress": []}


def test_remade_qdisc(
    home: StateDir, ns: Namespace, by_clsact: None, packets: list[Program]
) -> None:
    """A qdisc that another agent created in place of ours stays that agent's.

    Our filters are attached to it.
    """
    DevicePrograms(home, lambda link_header: packets).update(ns.served())
    ns.run("tc qdisc del dev v0 clsact")
    ns.run("tc qdisc add dev v0 clsact")
    DevicePrograms(home, lambda link_header: packets).update(ns.served())
    assert ns.filters("v0") == ids(packets)
    unpin_all(home)
    assert ns.has_clsact("v0")


@pytest.mark.parametrize("further_first", [True, False])
def test_the_last_filter_takes_our_qdisc_along(
    home: StateDir, ns: Namespace, by_clsact: None, packets: list[Program], further_first: bool
) -> None:
    """A further program at an uplink, and the packet programs, come and go in any order."""
    further, (here,) = uplink_program.ANSWER, [it for it in ns.served() if it.name == "v0"]
    filters = Clsact(home.devices_directory)
    both: dict[bool, tuple[Callable[[], None], Callable[[], None]]] = {
        True: (partial(further.attach, home, [here], packets[0]), partial(further.remove, home)),
        False: (
            partial(filters.attach, here.index, packets),
            partial(filters.detach, [here.index]),
        ),
    }
    for attach, _ in (both[further_first], both[not further_first]):
        attach()
    for _, remove in (both[further_first], both[not further_first]):
        assert ns.has_clsact("v0")
        remove()
    assert not ns.has_clsact("v0")
    assert [*home.devices_directory.iterdir()] == [home.devices_directory / further.name]


def test_taken_place(
    home: StateDir, ns: Namespace, by_clsact: None, other_program: Program, packets: list[Program]
) -> None:
    """Another filter with our priority and handle stays, and the error names it."""
    with_clsact(ns, "v0", other_program, priority=2, handle=0xEB)
    failed = DevicePrograms(home, lambda link_header: packets).update(ns.served())
    assert list(failed) == ["v0"]
    assert "other_program" in failed["v0"]
    assert ns.filters("v0")["ingress"] == [number(other_program)]
    unpin_all(home)
    assert ns.filters("v0") == {"ingress": [number(other_program)], "egress": []}


@pytest.fixture
def foreign_link(ns: Namespace, other_program: Program) -> Iterator[int]:
    """Attach another agent's tcx link at ingress of v0."""
    if not has_tcx():
        pytest.skip("this kernel has no tcx")
    link = bpf.link_create(other_program.fd, ns.index("v0"), tcx.TCX_HOOKS["ingress"])
    yield link
    os.close(link)


def test_with_tcx_ours_run_first(
    home: StateDir, ns: Namespace, foreign_link: int, other_program: Program, packets: list[Program]
) -> None:
    """With tcx our programs run before those of other software, which cannot hide packets from
    ours.
    """
    DevicePrograms(home, lambda link_header: packets).update(ns.served())
    assert ns.tcx("v0")["ingress"] == [*ids(packets)["ingress"], number(other_program)]
    theirs = f"other_program #{number(other_program)} (ingress)"
    assert others_programs(home) == ({}, {"v0": [theirs]})
    unpin_all(home)
    assert eventually(lambda: ns.tcx("v0")["ingress"] == [number(other_program)])


def test_ahead_by_tcx(
    home: StateDir, ns: Namespace, other_program: Program, packets: list[Program]
) -> None:
    """A tcx program before ours is named, with its device and hook; all filters run after ours."""
    if not has_tcx():
        pytest.skip("this kernel has no tcx")
    DevicePrograms(home, lambda link_header: packets).update(ns.served())
    link = bpf.link_create(other_program.fd, ns.index("v0"), tcx.TCX_HOOKS["egress"], tcx.BEFORE)
    with_clsact(ns, "v0", other_program, priority=1)
    with_clsact(ns, "w0", other_program, priority=7)
    before, after = others_programs(home)
    assert before == {"v0": [f"other_program #{number(other_program)} (egress)"]}
    assert after == {
        "v0": [f"bpf {ns.name}-other_program:[*fsobj] (ingress)"],
        "w0": [f"bpf {ns.name}-other_program:[*fsobj] (ingress)"],
    }
    os.close(link)
    unpin_all(home)


def test_ahead_of_clsact(
    home: StateDir,
    ns: Namespace,
    by_clsact: None,
    foreign_link: int,
    other_program: Program,
    packets: list[Program],
) -> None:
    """All tcx programs, and filters with a lower priority number, run before our filters."""
    with_clsact(ns, "w0", other_program, priority=1)
    with_clsact(ns, "br0", other_program, priority=3)
    DevicePrograms(home, lambda link_header: packets).update(ns.served())
    found, after = others_programs(home)
    assert after == {"br0": [f"bpf {ns.name}-other_program:[*fsobj] (ingress)"]}
    assert found.pop("v0") == [f"other_program #{number(other_program)} (ingress)"]
    assert found.pop("w0") == [f"bpf {ns.name}-other_program:[*fsobj] (ingress)"]  # as tc names it
    assert found == {}
    unpin_all(home)


def limit(ns: Namespace, device: str) -> None:
    """Add the qdisc and filter of the CNI plugin bandwidth, with which ours cannot coexist."""
    ns.run(f"tc qdisc add dev {device} handle ffff: ingress")
    everything = "protocol all u32 match u32 0 0 flowid 1:1"
    ns.run(f"tc filter add dev {device} parent ffff: {everything}")


def has_limit(ns: Namespace, device: str) -> bool:
    shown = ns.run(f"tc filter show dev {device} parent ffff:")
    return "qdisc ingress" in ns.run(f"tc qdisc show dev {device}") and "u32" in shown


def test_a_qdisc_ingress_is_shared(
    home: StateDir, ns: Namespace, by_clsact: None, packets: list[Program]
) -> None:
    """A qdisc ingress has room only for the program at ingress, which is no fault; its own filter
    stays.
    """
    limit(ns, "v0")
    made = DevicePrograms(home, lambda link_header: packets)
    assert made.update(ns.served()) == {}
    assert ns.filters("v0")["ingress"] == [number(packets[0])]
    assert made.attacher.without_egress == {ns.index("v0")}
    assert not any(made.faults(ns.served()))
    assert attached_devices(home)["clsact"] == len(ns.served())
    assert others_programs(home).after == {"v0": ["u32 (ingress)"]}
    unpin_all(home)
    assert has_limit(ns, "v0") and ns.filters("v0")["ingress"] == []


def test_a_new_pods_device_is_left_to_plugins_first(
    home: StateDir, ns: Namespace, by: str, packets: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If both qdiscs cannot coexist, the device of a new pod waits; the node's devices and earlier
    ones do not.
    """
    monkeypatch.setattr(device_programs, "PLUGIN_SECONDS", 0.3)
    made = DevicePrograms(home, lambda link_header: packets, None, lambda: None)
    made.update(ns.served(), ())
    assert eventually(lambda: not made.take_attached() and not made.to_come)
    ns.run("ip link add pod type veth peer name pod0")
    ns.run("ip link add br1 type bridge")
    made.update(ns.served(), ())
    if by == "clsact":
        assert not ns.has_clsact("pod")
    limit(ns, "pod")
    index = ns.index("br1")
    assert eventually(lambda: index in made.attacher.attached())
    assert eventually(lambda: not made.take_attached() and not made.to_come)
    assert has_limit(ns, "pod")
    assert not any(made.faults(ns.served()))
    made.close()
