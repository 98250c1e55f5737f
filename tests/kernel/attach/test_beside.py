# SPDX-License-Identifier: Apache-2.0
"""Programs at devices that have none yet, attached by a worker in the background."""

from collections.abc import Iterator

import pytest

from ebpflb.errors import KernelError
from ebpflb.kernel.attach import device_programs
from ebpflb.kernel.attach.device_programs import DevicePrograms
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs.loader import Program
from ebpflb.model.devices import Devices
from tests.kernel.attach.device_namespace import ALL, Agent, At, Namespace, ids
from tests.kernel.variants import needs_root

pytestmark = needs_root


class ByHand:
    """A worker whose steps the test takes."""

    def __init__(self) -> None:
        self.steps: Iterator[None] = iter(())

    def begin(self, steps: Iterator[None]) -> None:
        self.steps = steps

    def halt(self) -> None:
        self.steps = iter(())

    def stop(self) -> None:
        self.halt()


class Beside:
    """An agent whose worker is driven by the test."""

    def __init__(self, home: StateDir, programs: list[Program]) -> None:
        self.reports = 0
        self.calls: list[tuple[int, str]] = []  # device, hook
        self.made = DevicePrograms(home, lambda link_header: programs, on_attached=self._report)
        self.made.worker = self.worker = ByHand()  # type: ignore[assignment]
        self._attach = self.made.attacher.attach
        self.made.attacher.attach = self._attach_noted  # type: ignore[method-assign]

    def _attach_noted(self, index: int, programs: list[Program]) -> None:
        self.calls += [(index, program.name) for program in programs]
        self._attach(index, programs)

    def _report(self) -> None:
        self.reports += 1

    def take(self, count: int = 100) -> None:
        """Take some of the worker's steps, each an attachment, and note what is attached."""
        for _ in range(count):
            next(self.worker.steps, None)
        self.made.take_attached()


@pytest.fixture
def beside(home: StateDir, packets: list[Program], agent: Agent) -> Beside:
    """Return the agent; ``agent`` removes its programs at the end."""
    return Beside(home, packets)


def first(ns: Namespace) -> Devices:
    """Return all devices: v0, then those with a link header, which are served first."""
    return tuple(sorted(ns.served(), key=lambda it: (it.name != "v0", not it.link_header)))


def test_the_caller_does_not_wait(
    beside: Beside, ns: Namespace, at: At, packets: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first start waits only for the most important devices; the remaining ones follow in
    groups.
    """
    made, index = beside.made, ns.index("v0")
    monkeypatch.setattr(device_programs, "GROUP", 2)
    assert made.update(first(ns), {index}) == {}
    assert at("v0") == ids(packets)
    assert made.attached == {index}
    second, third, fourth = (device.index for device in first(ns)[1:])
    assert made.to_come == {second, third, fourth}
    beside.take()
    assert beside.calls == [
        *((index, "egress"), (index, "ingress")),
        *((second, "egress"), (third, "egress"), (second, "ingress"), (third, "ingress")),
        *((fourth, "egress"), (fourth, "ingress")),
    ]
    assert beside.reports == 2
    assert not made.to_come
    assert not any(made.faults(ns.served()))


def test_egress_comes_and_goes(
    beside: Beside, ns: Namespace, at: At, packets: list[Program]
) -> None:
    """The worker attaches it to devices that have served without, and removes it, without touching
    ingress; a device may come meanwhile.
    """
    made, devices = beside.made, ns.served()
    made.egress = False
    made.update(devices)
    alone = {**ids(packets), "egress": []}
    assert all(at(device.name) == alone for device in devices)
    assert not made.has_egress
    assert not any(made.faults(devices))
    made.egress = True
    made.update(devices, ())
    beside.take(2)
    assert not made.has_egress
    assert made.attached == {device.index for device in devices}
    beside.take()
    assert made.has_egress
    assert all(at(device.name) == ids(packets) for device in devices)
    assert not any(made.faults(devices))
    made.egress = False
    made.update(devices, ())
    beside.take()
    assert all(at(device.name) == alone for device in devices)
    assert not any(made.faults(devices))


def test_what_an_earlier_agent_left_at_egress_goes(
    agent: Agent, ns: Namespace, at: At, packets: list[Program]
) -> None:
    """If it is not wanted any more."""
    agent().update(ns.served())
    later = agent()
    later.egress = False
    later.update(ns.served())
    assert all(at(each.name) == {**ids(packets), "egress": []} for each in ns.served())


def test_devices_change_meanwhile(
    beside: Beside, ns: Namespace, at: At, packets: list[Program]
) -> None:
    """Waiting devices are updated when devices change; nothing is left of a removed one."""
    made = beside.made
    ns.run("ip link add late index 77 type bridge")
    made.update(first(ns), ())
    beside.take(len(ALL) + 2)
    ns.run("ip link del late")
    beside.take(2)
    made.update(first(ns), ())
    assert made.to_come == {device.index for device in ns.served()} - made.attached
    beside.take()
    assert not made.to_come
    assert all(at(name) == ids(packets) for name in ALL)
    assert made.attacher.recorded() == made.attached


def test_the_next_agent_goes_on(
    beside: Beside, ns: Namespace, at: At, newer: list[Program], home: StateDir
) -> None:
    """If an agent ends during its first start, the next one serves the remaining devices, and
    replaces the existing programs at once.
    """
    beside.made.update(first(ns), {ns.index("v0")})
    later = Beside(home, newer)
    later.made.update(first(ns), ())
    assert at("v0") == ids(newer)
    assert later.made.to_come == {ns.index(name) for name in ALL - {"v0"}}
    later.take()
    assert all(at(name) == ids(newer) for name in ALL)


def test_programs_are_replaced_meanwhile(
    beside: Beside, ns: Namespace, at: At, newer: list[Program]
) -> None:
    """After ``forget`` no former program is used, so that it can be closed."""
    made = beside.made
    made.update(first(ns), {ns.index("v0")})
    beside.take(1)
    made.forget()
    beside.take(1)
    made.load = lambda link_header: newer
    made.update(first(ns), ())
    assert at("v0") == ids(newer)
    beside.take()
    assert all(at(name) == ids(newer) for name in ALL)


def test_a_failure_is_named(beside: Beside, ns: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device at which the worker fails is named, and no longer counts as waiting."""
    made, index = beside.made, ns.index("br0")
    real = made.attacher.attach

    def attach(device: int, programs: list[Program]) -> None:
        if device == index:
            raise KernelError("tc", 12, "no memory")
        real(device, programs)

    monkeypatch.setattr(made.attacher, "attach", attach)
    made.update(first(ns), ())
    beside.take()
    assert made.take_attached().keys() == {"br0"}
    assert made.attached == {device.index for device in ns.served()} - {index}
    assert not made.to_come
