# SPDX-License-Identifier: Apache-2.0
"""When connections are searched for, and what programs report in between. Time is virtual."""

import errno
import math
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from ebpflb.agent import stale
from ebpflb.agent.stale import PASS_TIMES, StaleWorker
from ebpflb.entries.services import Frontend
from ebpflb.errors import KernelError, NodeError
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.node import sock_diag
from ebpflb.kernel.node.sock_diag import SockDiag
from ebpflb.kernel.stale import Ended
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.stale import Watched
from tests.agent.stale.tracked import GONE, REMOVED, entries, tracked
from tests.agent.stale.world import HERE, VIP, World, is_ended, removed, settle  # fmt: skip
from tests.kernel.attach.device_namespace import Namespace
from tests.kernel.variants import eventually, needs_root

pytestmark = needs_root

OTHER = GONE[0], 9
FIRST, SECOND = (Frontend(*at, Protocol.UDP) for at in (GONE, OTHER))
OF_TCP = VIP._replace(protocol=Protocol.TCP)
NAME = PortName("default", "web", "tcp", Protocol.TCP, Family.IPV4)


class Idle:
    """A worker without a thread; its searches find nothing, and fail as often as the test
    requests.
    """

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.cpu, self.failures = 100.0, 0.0, 0
        self.searched = list[dict[str, Any]]()
        self.reset = list[tuple[str, int]]()
        self.worker = StaleWorker(
            world.maps,
            world.each,
            world.socket_end.run,
            on_reset=lambda *done: self.reset.append(done),
            clock=lambda: self.now,
            cpu_clock=lambda: self.cpu,
        )
        monkeypatch.setattr(stale, "delete_entries", self._delete)
        monkeypatch.setattr(stale, "PASS_TIMES", PASS_TIMES)

    def _delete(self, maps: Any, judge: Any, protocols: Collection[Protocol], **how: Any) -> Ended:
        if self.failures:
            self.failures -= 1
            raise NodeError("conntrack cannot be listed")
        self.searched.append({"protocols": {*protocols}, **how})
        return Ended()

    @property
    def due(self) -> float:
        """The time of the next search of conntrack."""
        return self.worker.entries.due

    def turn(self) -> float:
        """Make the next search; return the time before it."""
        before, self.now = self.now, max(self.now, self.due)
        self.worker.entries.turn()
        return self.now - before


@pytest.fixture
def idle(world: World, monkeypatch: pytest.MonkeyPatch) -> Idle:
    world.worker.stop()
    return Idle(world, monkeypatch)


def test_twice_after_a_change(idle: Idle) -> None:
    """A search follows at once and again a second later; for UDP only after an endpoint was
    removed.
    """
    idle.worker.check([])
    assert idle.due == math.inf
    idle.worker.check([removed(GONE)])
    assert [idle.turn() < 0.1, 0.5 < idle.turn() < 2] == [True, True]
    assert idle.due == math.inf
    what = {"protocols": {Protocol.UDP}, "ports": {53}, "udp_endpoints": {GONE}}
    assert idle.searched == 2 * [{**what, "are_open": False, "untranslated": False}]


def test_what_may_be_untranslated_is_searched_for_by_ports(idle: Idle) -> None:
    """A frontend that begins to serve has entries to unknown endpoints, so conntrack is searched by
    its port.
    """
    idle.worker.check([removed(GONE), removed()])
    idle.turn()
    assert idle.searched[0]["udp_endpoints"] is None


def test_everything_after_a_start_and_what_came_untranslated(idle: Idle) -> None:
    idle.worker.check_everything()
    idle.worker.check_untranslated()
    while idle.due < math.inf:
        idle.turn()
    scopes = [(each["ports"], each["untranslated"]) for each in idle.searched]
    assert scopes == [(None, False), (None, True), (None, False)]


def test_changes_that_come_meanwhile_share_a_search(idle: Idle) -> None:
    """Changes during a search share the next one, and each gets its second search."""
    for protocol in (Protocol.UDP, Protocol.TCP):
        idle.worker.check([removed(GONE, protocol=protocol)])
    idle.turn()
    idle.now += 0.1
    idle.worker.check([removed(OTHER, protocol=Protocol.SCTP)])
    while idle.due < math.inf:
        idle.turn()
    both, one = {Protocol.UDP, Protocol.TCP}, {Protocol.SCTP}
    assert [each["protocols"] for each in idle.searched] == [both, one, both, one]


def test_changes_that_follow_fast_share_a_search(idle: Idle) -> None:
    """The first change after a pause is searched for at once; 400 a second share 10 searches."""
    for _ in range(400):
        idle.worker.check([removed(GONE)])
        if idle.due <= idle.now:
            idle.turn()
        idle.now += 1 / 400
    assert 8 <= len(idle.searched) <= 13


@pytest.mark.parametrize("everything", [False, True])
def test_a_pause_grows_with_the_search(
    idle: Idle, monkeypatch: pytest.MonkeyPatch, everything: bool
) -> None:
    """The pause is three times the search's CPU time, also when endpoints are removed one by one;
    after a search for everything it is a second at most.
    """

    def delete(*_: Any, **__: Any) -> Ended:
        idle.cpu += 5.0
        return Ended()

    monkeypatch.setattr(stale, "delete_entries", delete)
    if everything:
        idle.worker.check_everything()
    else:
        idle.worker.check([removed(GONE)])
    idle.turn()
    idle.worker.check([removed(GONE)])
    assert round(idle.turn(), 6) == (1.0 if everything else 15.0)


def test_changes_that_follow_fast_keep_no_other_search_waiting(idle: Idle) -> None:
    """What became stale while no agent ran is searched for, though endpoints go all the time."""
    idle.worker.check_everything()
    for _ in range(4):
        idle.worker.check([removed(GONE)])
        idle.turn()
    assert [each["ports"] for each in idle.searched].count(None) == 1


def test_what_has_failed_is_made_again(idle: Idle, caplog: pytest.LogCaptureFixture) -> None:
    """Failed searches are repeated after pauses up to a minute, or with the next change."""
    idle.failures = 9
    idle.worker.check([removed(GONE)])
    idle.turn()
    assert [round(idle.turn(), 6) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert idle.worker.error == "conntrack cannot be listed"
    assert caplog.text.count("conntrack cannot be listed") == 1
    idle.worker.check([removed(OTHER, protocol=Protocol.TCP)])
    assert round(idle.turn(), 6) <= 1
    assert idle.worker.error is None
    assert idle.searched[-1]["protocols"] == {Protocol.UDP, Protocol.TCP}
    idle.failures = 1
    idle.turn()
    assert round(idle.turn(), 6) == 1, "the pause is short again"


def test_open_connections_when_the_grace_ends(idle: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open connections are searched for twice after the change, and again when the grace period
    ends.
    """
    between = OF_TCP, GONE

    def delete(maps: Any, judge: Any, protocols: Any, **how: Any) -> Ended:
        idle.searched.append(how)
        name = judge.reset_by(*between)
        return Ended({between: 2}) if name else Ended()

    monkeypatch.setattr(stale, "delete_entries", delete)
    frontends = frozenset({OF_TCP})
    idle.worker.check((), {NAME: Watched(10.0, frontends, frozenset({GONE}))})
    idle.worker.check((), {NAME: Watched(10.0, frontends)})
    begun = idle.now
    while not idle.reset:
        idle.turn()
    assert 10.0 <= idle.now - begun < 10.1
    assert idle.reset == [("conntrack", 2)]
    assert all(each["are_open"] for each in idle.searched)
    assert len(idle.searched) == 3
    idle.turn()
    assert idle.due == math.inf


def test_a_shorter_grace_wakes_the_thread(idle: Idle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for the end of a grace waits for the end of the new one instead."""

    def delete(maps: Any, judge: Any, *_: Any, **__: Any) -> Ended:
        judge.reset_by(OF_TCP, GONE)
        return Ended()

    monkeypatch.setattr(stale, "delete_entries", delete)
    entries = idle.worker.entries
    idle.worker.check((), {NAME: Watched(1000.0, frozenset({OF_TCP}))})
    idle.turn()
    idle.turn()
    entries.start()
    assert eventually(lambda: entries.until == 1100.0)
    idle.worker.check((), {NAME: Watched(500.0, frozenset({OF_TCP}))})
    assert eventually(lambda: entries.until == 600.0)
    entries.stop()


def test_a_service_that_keeps_its_connections_costs_nothing(idle: Idle) -> None:
    idle.worker.check((), {NAME: None})
    assert idle.due == math.inf


# With a thread, real entries and real sockets.


def test_entries_are_deleted_while_sockets_are_searched_for(net: Namespace, world: World) -> None:
    """A search for sockets in all namespaces may take long; a later change does not wait for it."""
    go_on, searching = threading.Event(), threading.Event()

    def each(what: Callable[[], SockDiag], cookies: Collection[int]) -> Iterator[SockDiag]:
        searching.set()
        assert go_on.wait(60)
        yield what()

    world.worker.sockets.ender.each_namespace = each
    client = world.remember(world.direct())
    try:
        world.worker.check([removed((HERE, world.port))])
        assert searching.wait(60)
        tracked(str(VIP.address), VIP.port, REMOVED)
        world.worker.check([removed(GONE)])
        assert eventually(lambda: not entries())
    finally:
        go_on.set()
    if sock_diag.can_destroy():
        assert is_ended(client)


@pytest.mark.parametrize("error", [KernelError("map", errno.ENOSPC, "no space"), KeyError("map")])
def test_sockets_end_though_conntrack_fails_and_the_other_way_round(
    net: Namespace, world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A failed search is repeated until it succeeds, and its reason is reported."""
    monkeypatch.setattr(stale, "FIRST_RETRY", 0.01)
    for each in world.worker.searching:
        monkeypatch.setattr(each, "pause", 0.01)
    tracked(str(VIP.address), VIP.port, REMOVED)
    client, slices = world.remember(world.direct()), world.maps["sockets"].slices

    def refuse(*_words: Any) -> Any:
        raise error

    world.maps["sockets"].slices = refuse  # type: ignore[assignment, method-assign]
    world.worker.check([removed(GONE)])
    assert eventually(lambda: not entries() and "map" in str(world.worker.error))
    world.maps["sockets"].slices = slices  # type: ignore[method-assign]
    if not sock_diag.can_destroy():
        return
    with monkeypatch.context() as patched:
        patched.setattr(conntrack, "GET", 99 << 8 | 1)  # of no subsystem
        assert is_ended(client)
    settle(world)
    assert world.worker.error is None


def test_beside_a_kube_proxy_nothing_is_deleted(net: Namespace, world: World) -> None:
    """Beside a kube-proxy, its entries and its sockets are left alone, even sockets whose entries
    are gone.
    """
    tracked(str(VIP.address), VIP.port, REMOVED)
    world.maps["cluster_ips"].write([(VIP.address, 1)])
    client, before = world.open(), len(entries())
    client.connect((str(VIP.address), VIP.port))
    for each in world.worker.searching:
        each.shadow = True
    world.worker.check([removed(GONE)])
    world.worker.check_everything()
    settle(world)
    assert len(entries()) == before
    assert client.getpeername() == (str(VIP.address), VIP.port)
    for each in world.worker.searching:
        each.shadow = False
    world.worker.check([removed(GONE)])
    settle(world)
    assert not entries()
    if sock_diag.can_destroy():
        with pytest.raises(OSError, match="not connected"):
            client.getpeername()


def test_never_started(world: World) -> None:
    """A worker that was never started can be stopped."""
    StaleWorker(world.maps, world.each, world.socket_end.run).stop()
