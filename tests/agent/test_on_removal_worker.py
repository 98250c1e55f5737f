# SPDX-License-Identifier: Apache-2.0
"""Services that ask for nothing cost the worker that resets connections nothing."""

import errno
from collections import defaultdict
from collections.abc import Iterable
from ipaddress import IPv4Address
from typing import Any

import pytest

from ebpflb.agent.on_removal.reset_worker import ResetCounts, ResetWorker, WantedConnections
from ebpflb.entries.services import Frontend
from ebpflb.errors import KernelError
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.removed_endpoints import DELETED, Endpoint, Watched


def name(service: str) -> PortName:
    return PortName("default", service, "", Protocol.TCP, Family.IPV4)


def test_what_no_service_asked_for_changes_nothing() -> None:
    """Neither what the next agent has to know is made again, nor the thread woken."""
    worker = ResetWorker({}, (), {})
    endpoint = IPv4Address("10.1.0.1"), 80
    worker.update({name("watched"): Watched(1.0, frozenset(), frozenset({endpoint}))})
    before = worker.watched_ports
    assert before
    worker.update({name("other"): None, name("gone"): DELETED})
    assert worker.watched_ports is before
    worker.update({name("watched"): None})
    assert worker.watched_ports == ()


class Failing:
    """Connections of a kind that cannot be reset, or not even listed."""

    kind = "sockets"

    def __init__(self) -> None:
        self.resets = self.searches = 0

    def found(self, _wanted: WantedConnections) -> Iterable[tuple[Frontend, Endpoint]]:
        self.searches += 1
        raise KernelError("sock_diag", errno.EIO, "it failed")

    def reset(self, _wanted: WantedConnections, *, is_last: bool) -> ResetCounts:
        self.resets += 1
        raise KernelError("sock_diag", errno.EIO, "it failed")


class Waiting(Failing):
    """A minute passes before these are reset."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self._clock = clock

    def reset(self, _wanted: WantedConnections, *, is_last: bool) -> ResetCounts:
        self._clock[0] += 60
        return ResetCounts()


def test_who_waits_for_a_processor_makes_no_longer_pause() -> None:
    """The next pass is a second later, whatever time others had meanwhile."""
    clock = [0.0]
    maps: Any = defaultdict(dict)
    worker = ResetWorker(maps, (Waiting(clock),), {}, clock=lambda: clock[0], cpu_clock=lambda: 0)
    frontends = frozenset({Frontend(IPv4Address("10.96.0.1"), 1, 6)})
    for endpoints in (frozenset({(IPv4Address("10.1.0.1"), 80)}), frozenset[Endpoint]()):
        worker.update({name("a"): Watched(0, frontends, endpoints)})
    worker.searches = False
    worker.turn()
    assert (clock[0], worker.due) == (60, 61)


def failing_worker(clock: list[float]) -> tuple[ResetWorker, Failing]:
    """The endpoints of two Services have gone, and their graces end a second apart."""
    maps: Any = defaultdict(dict)
    kind = Failing()
    worker = ResetWorker(maps, (kind,), {}, clock=lambda: clock[0])
    for grace, service in enumerate("ab", 1):
        frontends = frozenset({Frontend(IPv4Address("10.96.0.1"), grace, 6)})
        listed = frozenset({(IPv4Address(f"10.1.0.{grace}"), 80)})
        for endpoints in (listed, frozenset[Endpoint]()):
            worker.update({name(service): Watched(grace, frontends, endpoints)})
    worker.searches = False  # for endpoints that went before these were watched
    return worker, kind


def test_a_pass_that_fails_keeps_no_other_from_being_made() -> None:
    """Both are due in the last turn, and both are to be made again."""
    clock = [0.0]
    worker, kind = failing_worker(clock)
    for number, now in enumerate((1.5, 2.5, 100.0), 1):
        clock[0] = now
        with pytest.raises(KernelError):
            worker.search_and_end()
        assert kind.resets >= number
    assert kind.resets == 4
    assert {gone.service for each in worker.passes for gone in each.gone} == {name("a"), name("b")}


def test_a_search_that_fails_is_made_again() -> None:
    worker, kind = failing_worker([0.0])
    worker.searches = True
    for number in (1, 2):
        with pytest.raises(KernelError):
            worker.search_and_end()
        assert (kind.searches, worker.searches) == (number, True)
