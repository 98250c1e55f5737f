# SPDX-License-Identifier: Apache-2.0
"""The order of attaching and detaching: no device opens flows before all translate replies."""

from collections.abc import Callable
from typing import Any

import pytest

from ebpflb.errors import KernelError
from ebpflb.kernel.attach import tcx
from ebpflb.kernel.attach.clsact import Clsact
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.attach.tcx import Tcx
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs.loader import Program
from tests.kernel.attach.device_namespace import ALL, HOOKS, Agent, At, Namespace, number
from tests.kernel.variants import needs_root

pytestmark = needs_root
State = dict[str, set[str]]  # hook -> the devices that have a program there
States = list[State]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, ns: Namespace, at: At) -> States:
    """Yield the state of the kernel after every attachment and detachment."""
    found: States = []

    def look(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*words: Any) -> Any:
            result = change(*words)
            names = {device.name for device in ns.served()}
            there = {name: at(name) for name in names}
            found.append({hook: {n for n in names if there[n][hook]} for hook in HOOKS})
            return result

        return changed

    for kind in (Tcx, Clsact):
        monkeypatch.setattr(kind, "attach", look(kind.attach))
    monkeypatch.setattr(Clsact, "detach_hook", look(Clsact.detach_hook))
    monkeypatch.setattr(tcx, "detach", look(tcx.detach))
    return found


def assert_egress_covers(states: States, devices: set[str]) -> None:
    """If any device has a program at ingress, all devices have one at egress."""
    assert any(state["ingress"] & devices for state in states)
    assert any(devices - state["ingress"] for state in states)
    for state in states:
        assert not state["ingress"] & devices or devices <= state["egress"], state


def test_egress_everywhere_first(agent: Agent, ns: Namespace, seen: States) -> None:
    """At a start no device has a program at ingress before all have one at egress."""
    agent().update(ns.served())
    assert_egress_covers(seen, ALL)
    assert seen[-1] == {"ingress": ALL, "egress": ALL}


def test_an_upgrade_replaces_programs_at_egress_first(
    agent: Agent, ns: Namespace, newer: list[Program], at: At, seen: States
) -> None:
    """A new agent first replaces all programs at egress, and no hook is ever empty."""
    agent().update(ns.served())
    seen.clear()
    egress = number(next(p for p in newer if p.name == "egress"))
    made = agent(newer)
    before, real = [], made.attacher.attach

    def attach(index: int, programs: list[Program]) -> None:
        if [p.name for p in programs] == ["ingress"]:
            before.append({name for name in ALL if at(name)["egress"] == [egress]})
        real(index, programs)

    made.attacher.attach = attach  # type: ignore[method-assign]
    assert made.update(ns.served()) == {}
    assert before == [ALL] * len(ALL)
    assert all(state == {"ingress": ALL, "egress": ALL} for state in seen)


@pytest.mark.parametrize("everything", [True, False], ids=["removed", "left out"])
def test_ingress_leaves_first(
    agent: Agent, ns: Namespace, home: StateDir, seen: States, everything: bool
) -> None:
    """Programs are removed from ingress everywhere before any is removed from egress, without a
    wait.
    """
    agent().update(ns.served())
    seen.clear()
    if everything:
        unpin_all(home)
    else:
        agent().update(ns.served("!w*", "!br*", "!tun*"))
    assert_egress_covers(seen, ALL if everything else ALL - {"v0"})
    assert not (seen[-1]["ingress"] | seen[-1]["egress"]) & {"w0", "br0", "tun0"}


def test_ingress_without_egress(
    agent: Agent, ns: Namespace, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that cannot have a program at egress is named, and gets none at ingress."""
    made = agent()
    real, index = made.attacher.attach, ns.index("br0")

    def attach(device: int, programs: list[Program]) -> None:
        if device == index:
            raise KernelError("tc", 12, "no memory")
        real(device, programs)

    monkeypatch.setattr(made.attacher, "attach", attach)
    assert made.update(ns.served()).keys() == {"br0"}
    assert at("br0")["ingress"] == []
    assert at("v0")["ingress"]
