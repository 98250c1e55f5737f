# SPDX-License-Identifier: Apache-2.0
"""Entries of conntrack are deleted for the UDP flows that programs report (bpf: tests/packet)."""

import os
from collections.abc import Callable, Iterator

import pytest

from ebpflb.agent import stale
from ebpflb.agent.stale import MOST_FLOWS, MovedFlowsWorker
from ebpflb.entries.flows import Hook, Tuple
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.stale import ServedFrontends
from ebpflb.model.addresses import Family
from ebpflb.plan.stale import Stale
from tests.agent.stale.tracked import GONE, REMOVED, entries, tracked
from tests.agent.stale.world import UDP, VIP, World, removed, settle
from tests.kernel.attach.device_namespace import Namespace
from tests.kernel.variants import eventually, needs_root

pytestmark = needs_root


class FakeRing:
    """A ring that the test fills; only programs can fill a real one."""

    def __init__(self) -> None:
        self.counter = os.eventfd(0)
        self.waiting: list[Tuple] = []

    def fileno(self) -> int:
        return self.counter

    def report(self, flows: list[Tuple]) -> None:
        self.waiting = flows
        os.eventfd_write(self.counter, 1)

    def take(self) -> bytes:
        return b""

    def take_values(self) -> list[Tuple]:
        if self.waiting:
            os.eventfd_read(self.counter)
        taken, self.waiting = self.waiting, []
        return taken

    def close(self) -> None:
        os.close(self.counter)


Report = Callable[[list[Tuple]], None]


@pytest.fixture
def report(net: Namespace, world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Report]:
    """Return a function that reports flows to a worker, as a program does."""
    ring = FakeRing()
    monkeypatch.setattr(stale, "Ring", lambda _: ring)
    found = world.found

    def judge() -> Stale:
        served = ServedFrontends(world.maps)
        return Stale(served.endpoints, served.keys, ())

    worker = MovedFlowsWorker(world.maps, judge, lambda f, _, count: found.append((f, count)))
    worker.start()
    try:
        yield ring.report
    finally:
        worker.stop()


def flow_of(source_port: int, hook: Hook = Hook.INGRESS) -> Tuple:
    """Return the flow of ``tracked`` from this port, as the hook sees it."""
    (entry,) = (e for e in entries() if e.original.source_port == source_port)
    ends = entry.original if hook is Hook.INGRESS else entry.reply.reversed()
    return Tuple(*ends, UDP, hook)


def ports() -> set[int]:
    return {each.original.source_port for each in entries()}


def test_very_many_flows(world: World, report: Report) -> None:
    """In a flood only the first flows are deleted one by one; the search deletes the rest."""
    for source in (4001, 4002):
        tracked(str(VIP.address), VIP.port, REMOVED, source=source)
    first, last = flow_of(4001), flow_of(4002)
    unknown = [first._replace(source_port=port) for port in range(1, MOST_FLOWS)]
    report([first, *unknown, last])
    assert eventually(lambda: world.found == [(Family.IPV4, 1)])
    assert ports() == {4002}


def test_a_flow_that_is_reported_often(world: World, report: Report) -> None:
    """Repeated reports of a flow displace no other flow: a program may report each datagram."""
    for source in (4001, 4002):
        tracked(str(VIP.address), VIP.port, REMOVED, source=source)
    report([*[flow_of(4001)] * MOST_FLOWS, flow_of(4002)])
    assert eventually(lambda: world.found == [(Family.IPV4, 2)])
    assert not ports()


def test_the_search_deletes_what_a_report_could_not(
    world: World, report: Report, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If deleting a reported entry fails, this is logged, the thread goes on, and the search
    deletes the entry.
    """
    tracked(str(VIP.address), VIP.port, REMOVED, source=4001)
    tracked(str(VIP.address), VIP.port, REMOVED, source=4002)
    first, second = flow_of(4001), flow_of(4002)
    with monkeypatch.context() as patched:
        patched.setattr(conntrack, "DELETE", 99 << 8 | 2)  # of no subsystem
        report([first])
        assert eventually(lambda: "stay in conntrack until the next search" in caplog.text)
    assert ports() == {4001, 4002}
    report([second])
    assert eventually(lambda: ports() == {4001})
    world.worker.check([removed(GONE)])
    settle(world)
    assert not entries()
