# SPDX-License-Identifier: Apache-2.0
"""Devices that come, go, move away and take each other's place."""

import pytest
from pyroute2 import netns

from ebpflb.datapath.programs import Program
from tests.datapath.devices import NONE, Agent, At, Namespace, home_of, ids
from tests.datapath.variants import eventually, needs_root

pytestmark = needs_root


def test_late_device(agent: Agent, ns: Namespace, at: At, packets: list[Program]) -> None:
    """A device that comes later is served like the others."""
    made = agent()
    made.follow(ns.served())
    ns.run("ip link add late type bridge")
    assert made.follow(ns.served()) == {}
    assert at("late") == ids(packets)


@pytest.mark.parametrize("watched", [True, False], ids=["agent saw it", "agent was dead"])
def test_same_index(
    agent: Agent, ns: Namespace, at: At, packets: list[Program], watched: bool
) -> None:
    """A device that got the index of one that went is served, whatever was remembered of that."""
    made = agent()
    ns.run("ip link add late index 77 type bridge")
    made.follow(ns.served())
    ns.run("ip link del late")
    ns.run("ip link add later index 77 type bridge")
    assert at("later") == NONE
    assert (made if watched else agent()).follow(ns.served()) == {}
    assert at("later") == ids(packets)


def test_device_goes(agent: Agent, ns: Namespace) -> None:
    """Nothing is kept of a device that went."""
    made = agent()
    ns.run("ip link add late index 77 type bridge")
    made.follow(ns.served())
    ns.run("ip link del late")
    made.follow(ns.served())
    assert not list(home_of(made).devices_directory.glob("77-*"))


def test_device_goes_at_once(agent: Agent, ns: Namespace) -> None:
    """A device that went before it could be served is no failure."""
    made, found = agent(), ns.served()
    ns.run("ip link del br0")
    assert made.follow(found) == {}


def test_device_moves(agent: Agent, ns: Namespace, at: At, by: str) -> None:
    """A device that moves to a pod loses our programs; one that takes its index gets them."""
    made, pod = agent(), Namespace(f"{ns.name}-pod")
    netns.create(pod.name)
    try:
        made.follow(ns.served())
        index = ns.index("w0")
        ns.run(f"ip link set w0 netns {pod.name}")
        ns.run(f"ip link add w0 index {index} type bridge")
        assert at("w0") == NONE
        made.follow(ns.served())
        assert set(map(len, at("w0").values())) == {1}
        netns.pushns(pod.name)
        try:
            there = pod.tcx if by == "tcx" else pod.filters
            assert eventually(lambda: there("w0") == NONE)
        finally:
            netns.popns()
    finally:
        netns.remove(pod.name)
