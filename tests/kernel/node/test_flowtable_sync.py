# SPDX-License-Identifier: Apache-2.0
"""The entries that are written to the flowtable, and when, with a fake kernel."""

import errno
from ipaddress import ip_address

import pytest

from ebpflb.entries.services import Frontend, Range, ServiceEntry
from ebpflb.kernel.netfilter import flowtable, nft
from ebpflb.kernel.netfilter.flowtable import (
    Contents,
    FlowtableSync,
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
DEVICES = {"lo": 1}


class FakeKernel:
    """A kernel with or without a flowtable; ``reads`` counts comparisons, ``writes`` complete
    writes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contents: Contents | None = None
        self.refusals = 0  # of the next writes
        self.reads = self.writes = 0
        for name in ("read", "write", "change"):
            monkeypatch.setattr(flowtable, name, getattr(self, name))
        monkeypatch.setattr(nft, "delete", self.delete)

    def read(self, _: object) -> Contents | None:
        self.reads += 1
        return self.contents

    def write(self, _: object, wanted: Contents) -> None:
        self.writes += 1
        self.contents = wanted

    def change(self, table: nft.Name, former: Contents, wanted: Contents) -> None:
        if self.refusals:
            self.refusals -= 1
            raise nft.Refused(table, errno.ENOENT)
        assert self.contents == former
        self.contents = wanted

    def delete(self, _: object) -> None:
        self.contents = None


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    return FakeKernel(monkeypatch)


@pytest.fixture
def it() -> FlowtableSync:
    """Return a sync that knows one device and one frontend."""
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
    """An earlier agent's entries stay until devices and frontends are known."""
    kernel.contents = found = Contents({}, packed(NODEPORT))
    made = FlowtableSync(is_wanted=True)
    for tell in (lambda: made.place([LO], []), lambda: made.start_over([WEB])):
        made.catch_up(needed=True)
        assert made.look(needed=True, report_only=False) == []
        assert kernel.contents == found
        tell()
    made.catch_up(needed=True)
    assert kernel.contents == Contents(DEVICES, packed(WEB)) and not kernel.writes
    assert made.said == "active on 1 devices"


def test_changes_are_written_without_a_look(kernel: FakeKernel, it: FlowtableSync) -> None:
    """A plan that changes only endpoints is written without reading from the kernel."""
    woken: list[str] = []
    it.on_change = lambda: woken.append("woken")
    it.catch_up(needed=True)
    looks = kernel.reads
    it.written(Plan(services=[(WEB, ENTRY)]))
    assert not woken
    it.written(Plan(services=[(NODEPORT, ENTRY)], removed_services=[WEB]))
    assert woken
    it.catch_up(needed=True)
    assert kernel.contents == Contents(DEVICES, packed(NODEPORT))
    assert (kernel.reads, kernel.writes) == (looks, 1)


def test_flows_end_and_the_content_stays(kernel: FakeKernel, it: FlowtableSync) -> None:
    """Each call removes the table, which ends its flows, and makes it again at once."""
    woken: list[str] = []
    it.on_change = lambda: woken.append("woken")
    it.catch_up(needed=True)
    before, writes = kernel.contents, kernel.writes
    it.end_flows()
    assert woken
    for _ in range(2):
        it.catch_up(needed=True)
        assert (kernel.contents, kernel.writes) == (before, writes + 1)


def test_rules_for_each_packet(kernel: FakeKernel, it: FlowtableSync) -> None:
    """While --fast-forward=auto has a reason against it there is no table, and the reason is
    shown.
    """
    it.catch_up(needed=True)
    whole = kernel.contents
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
    for other in (None, Contents(DEVICES, frozenset())):
        kernel.contents = other
        assert it.look(needed=True, report_only=report_only)
        assert kernel.contents == (other if report_only else whole)
    kernel.contents = whole
    assert it.look(needed=True, report_only=report_only) == []


def test_a_missing_existing_device_is_a_difference() -> None:
    """A device that the kernel removed is no difference; an existing device that the table lacks
    is.
    """
    made = Contents({"lo": 1, "gone0": 7}, packed(WEB))
    assert differences(Contents(DEVICES, packed(WEB)), made) == []
    assert differences(Contents({}, packed(NODEPORT)), made) == [
        "the flowtable's device lo was missing",
        "2 frontends were missing or unknown in the flowtable's sets",
    ]


def test_offloads_live_while_devices_come_and_go(kernel: FakeKernel, it: FlowtableSync) -> None:
    """Everything is written again only if a device exists and must leave."""
    it.place([GONE], [V4, V6])
    it.catch_up(needed=True)
    assert kernel.contents == Contents({}, packed(WEB))
    writes = kernel.writes
    it.place([LO, GONE], [V4, V6])
    it.catch_up(needed=True)
    assert (kernel.contents, kernel.writes) == (Contents(DEVICES, packed(WEB)), writes)
    it.place([GONE], [V4, V6])
    it.catch_up(needed=True)
    assert (kernel.contents, kernel.writes) == (Contents({}, packed(WEB)), writes + 1)


def test_a_device_that_goes_meanwhile(kernel: FakeKernel, it: FlowtableSync) -> None:
    """The kernel refuses a removed device once; a lasting refusal is an error."""
    it.catch_up(needed=True)
    it.start_over([NODEPORT])
    kernel.refusals = 1
    it.catch_up(needed=True)
    assert kernel.contents == Contents(DEVICES, packed(NODEPORT))
    it.start_over([WEB])
    kernel.refusals = 2
    with pytest.raises(nft.Refused):
        it.catch_up(needed=True)


@pytest.mark.parametrize(
    ("is_wanted", "missing", "needed"),
    [(False, None, True), (True, "no flowtable", True), (True, None, False)],
    ids=["not wanted", "no kernel", "flow tables"],
)
def test_it_is_removed(
    kernel: FakeKernel, is_wanted: bool, missing: str | None, needed: bool
) -> None:
    """An earlier agent's flowtable is removed if it is no longer wanted."""
    kernel.contents = Contents({}, frozenset())
    made = FlowtableSync(is_wanted=is_wanted, missing=missing)
    assert made.look(needed=needed, report_only=False) == []
    assert kernel.contents is None
    assert made.said == (
        f"none: {missing}" if missing else "active on 0 devices" if is_wanted else None
    )
