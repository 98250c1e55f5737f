# SPDX-License-Identifier: Apache-2.0
"""The entries that are written to the flowtable, and when, with the test's own kernel."""

import socket
from ipaddress import ip_address

import pytest

from ebpflb.entries.services import Frontend, Range, ServiceEntry
from ebpflb.kernel.netfilter import flowtable
from ebpflb.kernel.netfilter.flowtable import (
    EMPTY_FLOWTABLE,
    Contents,
    FlowtableSync,
    InFlowtable,
    differences,
    element,
    elements,
)
from ebpflb.model.devices import Device
from ebpflb.plan.planner import Plan

V4, V6 = ip_address("192.0.2.1"), ip_address("2001:db8::1")
WEB = Frontend(ip_address("10.96.0.10"), 80, 6)
NODEPORT = Frontend(ip_address("0.0.0.0"), 30080, 17)
ENTRY = ServiceEntry(1, frozenset(), 0, 0, Range(0, 0), Range(0, 0))
LO = Device(1, "lo", False, True, 0, (), ())
GONE = Device(7, "gone0", False, True, 0, (), ())


class FakeKernel:
    """A flowtable, or none; ``refused``: device -> why; ``reads`` counts the looks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contents: Contents | None = None
        self.refused: dict[str, str] = {}
        self.reads = self.removals = 0
        for name in ("read", "make", "remove", "add_devices"):
            monkeypatch.setattr(flowtable, name, getattr(self, name))
        for name in ("remove_devices", "change_frontends"):
            monkeypatch.setattr(flowtable, name, getattr(self, name))

    @property
    def found(self) -> Contents:
        assert self.contents is not None
        return self.contents

    def read(self, _: object) -> Contents | None:
        self.reads += 1
        return self.contents

    def make(self, _: object) -> None:
        self.contents = EMPTY_FLOWTABLE

    def remove(self, _: object) -> None:
        self.removals += 1
        self.contents = None

    def add_devices(self, _: object, names: set[str]) -> dict[str, str]:
        refused = {name: why for name, why in self.refused.items() if name in names}
        taken = self.found.devices | (names - refused.keys())
        self.contents = self.found._replace(devices=taken)
        return refused

    def remove_devices(self, _: object, names: set[str]) -> None:
        self.contents = self.found._replace(devices=self.found.devices - names)

    def change_frontends(self, _: object, new: set[bytes], gone: set[bytes]) -> None:
        self.contents = self.found._replace(frontends=(self.found.frontends | new) - gone)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    return FakeKernel(monkeypatch)


@pytest.fixture
def it() -> FlowtableSync:
    """Told of one device and one frontend."""
    made = FlowtableSync(is_wanted=True)
    made.place([LO], [V4, V6])
    made.start_over([WEB])
    return made


def packed(*frontends: Frontend) -> frozenset[bytes]:
    return elements(frontends, [V4, V6])


def test_a_nodeport_is_at_each_address_of_its_family() -> None:
    assert packed(NODEPORT) == {element(V4.packed, 17, 30080)}
    assert packed(WEB) == {element(WEB.address.packed, 6, 80)}


def test_nothing_is_written_before_all_is_known(kernel: FakeKernel) -> None:
    """The entries of an earlier agent stay until all is known."""
    kernel.contents = found = Contents(frozenset({"eth0"}), packed(WEB))
    made = FlowtableSync(is_wanted=True)
    for tell in (lambda: made.place([LO], []), lambda: made.start_over([WEB])):
        made.catch_up(needed=True)
        assert made.look(needed=True, report_only=False) == []
        assert kernel.contents == found
        tell()
    made.catch_up(needed=True)
    assert kernel.contents == Contents(frozenset({"lo"}), packed(WEB))
    assert made.said == "active on 1 devices"


def test_changes_are_written_without_a_look(kernel: FakeKernel, it: FlowtableSync) -> None:
    """A plan that only changes endpoints is written without a look at the kernel."""
    woken: list[str] = []
    it.on_change = lambda: woken.append("woken")
    it.catch_up(needed=True)
    looks = kernel.reads
    it.written(Plan(services=[(WEB, ENTRY)]))
    assert not woken
    it.written(Plan(services=[(NODEPORT, ENTRY)], removed_services=[WEB]))
    assert woken
    it.catch_up(needed=True)
    assert kernel.found.frontends == packed(NODEPORT)
    assert kernel.reads == looks


def test_flows_end_and_the_content_stays(kernel: FakeKernel, it: FlowtableSync) -> None:
    """The table is removed, which ends its flows, and made again at once; once for each call."""
    woken: list[str] = []
    it.on_change = lambda: woken.append("woken")
    it.catch_up(needed=True)
    before = kernel.found
    it.end_flows()
    assert woken
    for _ in range(2):
        it.catch_up(needed=True)
        assert (kernel.contents, kernel.removals) == (before, 1)


def test_rules_for_each_packet(kernel: FakeKernel, it: FlowtableSync) -> None:
    """While --fast-forward=auto has a reason there is no table, and the reason is said."""
    it.catch_up(needed=True)
    whole = kernel.found
    it.allow("a rule logs each packet")
    it.catch_up(needed=True)
    assert kernel.contents is None
    assert it.look(needed=True, report_only=False) == []
    assert it.said == "none: a rule logs each packet"
    it.allow(None)
    it.catch_up(needed=True)
    assert kernel.contents == whole


@pytest.mark.parametrize("report_only", [False, True], ids=["repair", "report"])
def test_what_differs_is_named(kernel: FakeKernel, it: FlowtableSync, report_only: bool) -> None:
    """A difference is named, and corrected if the caller wants it."""
    it.catch_up(needed=True)
    whole = kernel.contents
    for other in (None, EMPTY_FLOWTABLE):
        kernel.contents = other
        assert it.look(needed=True, report_only=report_only)
        assert kernel.contents == (other if report_only else whole)
    kernel.contents = whole
    assert it.look(needed=True, report_only=report_only) == []


def test_differences() -> None:
    """A device that the kernel removes with its hook is none; one that is there is."""
    made = InFlowtable({"lo": 1, "gone0": 7}, packed(WEB))
    assert differences(Contents(frozenset({"lo"}), packed(WEB)), made) == []
    assert differences(Contents(frozenset(), packed(NODEPORT)), made) == [
        "the flowtable's device lo was missing",
        "1 frontends missing from the flowtable's sets",
        "1 extra entries in the flowtable's sets",
    ]
    assert ("lo", 1) in [(name, index) for index, name in socket.if_nameindex()]


def test_a_device_that_is_refused_is_said_and_tried_again(
    kernel: FakeKernel, caplog: pytest.LogCaptureFixture
) -> None:
    """Once in the log; one that has gone meanwhile is none."""
    kernel.refused = {"lo": "no such hook", "gone0": "no such device"}
    made = FlowtableSync(is_wanted=True)
    made.start_over([])
    for addresses in ([], [V4]):
        made.place([LO, GONE], addresses)
        made.catch_up(needed=True)
        assert made.said == "active on 0 devices; lo is left out: no such hook"
    assert caplog.text.count("device lo cannot be in the flowtable: no such hook") == 1
    kernel.refused = {}
    made.place([LO], [])
    made.catch_up(needed=True)
    assert kernel.found.devices == {"lo"} and not made.left_out


@pytest.mark.parametrize(
    ("is_wanted", "missing", "needed"),
    [(False, None, True), (True, "no flowtable", True), (True, None, False)],
    ids=["not wanted", "no kernel", "flow tables"],
)
def test_it_is_removed(
    kernel: FakeKernel, is_wanted: bool, missing: str | None, needed: bool
) -> None:
    """An earlier agent's, where it is not wanted any more."""
    kernel.contents = EMPTY_FLOWTABLE
    made = FlowtableSync(is_wanted=is_wanted, missing=missing)
    assert made.look(needed=needed, report_only=False) == []
    assert kernel.contents is None
    assert made.said == (
        f"none: {missing}" if missing else "active on 0 devices" if is_wanted else None
    )
