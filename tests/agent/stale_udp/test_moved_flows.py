# SPDX-License-Identifier: Apache-2.0
"""Entries of conntrack are deleted for the UDP flows that programs report (bpf: tests/packet)."""

import os
from collections.abc import Callable, Iterator

import pytest

from ebpflb.agent.stale_udp import conntrack_worker
from ebpflb.agent.stale_udp.conntrack_worker import MOST_FLOWS, MovedFlowsWorker, StaleConnections
from ebpflb.entries.flows import Hook, Tuple
from ebpflb.kernel.netfilter import conntrack
from ebpflb.model.addresses import Family
from tests.agent.stale_udp.tracked import (
    GONE,
    REMOVED,
    SERVING,
    change,
    entries,
    tracked,
)
from tests.agent.stale_udp.world import UDP, VIP, World, settle
from tests.kernel.attach.device_namespace import Namespace
from tests.kernel.variants import eventually, needs_root

pytestmark = needs_root

Report = Callable[[list[Tuple]], None]


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


@pytest.fixture
def deleted() -> list[tuple[Family, int]]:
    """Return what the worker has said about its deletions."""
    return []


@pytest.fixture
def report(
    net: Namespace,
    world: World,
    deleted: list[tuple[Family, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Report]:
    """A function that reports flows to a worker, as a program does."""
    ring = FakeRing()
    monkeypatch.setattr(conntrack_worker, "Ring", lambda _: ring)
    worker = MovedFlowsWorker(world.maps, lambda f, _, count: deleted.append((f, count)))
    worker.start()
    try:
        yield ring.report
    finally:
        worker.stop()


def flow_of(source_port: int, hook: Hook = Hook.INGRESS) -> Tuple:
    """The flow of ``tracked`` from this port, as the hook sees it."""
    (entry,) = (e for e in entries() if e.original.source_port == source_port)
    ends = entry.original if hook is Hook.INGRESS else entry.reply.reversed()
    return Tuple(*ends, UDP, hook)


def ports() -> set[int]:
    return {each.original.source_port for each in entries()}


@pytest.mark.parametrize("hook", [Hook.INGRESS, Hook.EGRESS])
def test_a_reported_flow(report: Report, deleted: list[tuple[Family, int]], hook: Hook) -> None:
    """Its entry is deleted, and no other one: the table is not searched."""
    for source in (4001, 4002):
        tracked(str(VIP.address), VIP.port, REMOVED, source=source)
    report([flow_of(4001, hook)])
    assert eventually(lambda: deleted)
    assert ports() == {4002}
    assert deleted == [(Family.IPV4, 1)]


def test_a_flow_whose_endpoint_serves(report: Report, deleted: list[tuple[Family, int]]) -> None:
    """It stays: a kube-proxy, or a former choice, may have sent it elsewhere than the program.

    So do flows to a removed endpoint that are not of this frontend, and the endpoint's own.
    """
    tracked(str(VIP.address), VIP.port, SERVING, source=4001)
    tracked(str(VIP.address), VIP.port, REMOVED, source=4002)
    tracked("10.244.8.8", 5353, source=4004)
    left = [flow_of(4001), flow_of(4001, Hook.EGRESS), flow_of(4004, Hook.EGRESS)]
    report([*left, flow_of(4002), flow_of(4002)._replace(source_port=4003)])
    assert eventually(lambda: deleted)
    assert ports() == {4001, 4004}


def test_a_service_without_endpoints(net: Namespace, world: World) -> None:
    """Its flows to a removed endpoint are deleted: a stranger may get the endpoint's address."""
    tracked(str(VIP.address), VIP.port, REMOVED, source=4001)
    world.serve()
    assert StaleConnections(world.maps).delete_flows([flow_of(4001)]).total() == 1
    assert not entries()


def test_very_many_flows(report: Report, deleted: list[tuple[Family, int]]) -> None:
    """In a flood only the first flows are deleted one by one: the search deletes the others."""
    for source in (4001, 4002):
        tracked(str(VIP.address), VIP.port, REMOVED, source=source)
    first, last = flow_of(4001), flow_of(4002)
    unknown = [first._replace(source_port=port) for port in range(1, MOST_FLOWS)]
    report([first, *unknown, last])
    assert eventually(lambda: deleted)
    assert ports() == {4002}


def test_a_flow_that_is_reported_often(report: Report, deleted: list[tuple[Family, int]]) -> None:
    """It takes no room of others: egress reports each datagram until the entry is deleted."""
    for source in (4001, 4002):
        tracked(str(VIP.address), VIP.port, REMOVED, source=source)
    report([*[flow_of(4001, Hook.EGRESS)] * MOST_FLOWS, flow_of(4002, Hook.EGRESS)])
    assert eventually(lambda: deleted)
    assert not ports()


def test_the_search_deletes_what_a_report_could_not(
    world: World,
    report: Report,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A failed deletion is logged; the thread goes on, and the search deletes the entry."""
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
    world.connections.check(change(GONE))
    settle(world)
    assert not entries()
