# SPDX-License-Identifier: Apache-2.0
"""The removed endpoints, since when, and when the grace of their Service is over."""

import math
from ipaddress import ip_address

import msgspec

from ebpflb.entries.services import Frontend
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.removed_endpoints import (
    DELETED,
    MOST_REMOVED,
    Gone,
    RemovedEndpoints,
    Watched,
    WatchedPort,
    restore_watched,
)

WEB = PortName("default", "web", "http", Protocol.TCP, Family.IPV4)
DNS = PortName("default", "dns", "", Protocol.TCP, Family.IPV6)
VIP = Frontend(ip_address("10.96.0.10"), 80, 6)
ONE, OTHER = [(ip_address(f"10.244.1.{number}"), 8080) for number in (1, 2)]


def watched(*endpoints: object, grace: float = 10.0) -> Watched:
    return Watched(grace, frozenset({VIP}), frozenset(endpoints))  # type: ignore[arg-type]


def serving(*endpoints: object) -> RemovedEndpoints:
    made = RemovedEndpoints({})
    assert made.update(WEB, watched(*endpoints), 0.0)
    return made


def gone(*endpoints: object, since: float = 5.0) -> list[Gone]:
    return [Gone(WEB, each, frozenset({VIP}), since) for each in endpoints]  # type: ignore[arg-type]


def test_a_removal_is_due_after_the_grace_and_once() -> None:
    removed = serving(ONE, OTHER)
    assert removed.due() == math.inf
    assert not removed.update(WEB, watched(OTHER), 5.0)
    assert removed.due() == 15.0
    assert not removed.take_due(14.9)
    assert removed.take_due(15.0) == gone(ONE)
    assert not removed.take_due(100.0)


def test_the_grace_begins_when_the_endpoint_goes_and_not_with_later_changes() -> None:
    removed = serving(ONE, OTHER)
    removed.update(WEB, watched(OTHER), 5.0)
    removed.update(WEB, watched(), 9.0)
    removed.update(WEB, watched(grace=2.0), 9.5)
    assert removed.take_due(9.5) == gone(ONE)
    assert removed.due() == 11.0


def test_an_endpoint_that_comes_back_is_forgotten() -> None:
    removed = serving(ONE)
    removed.update(WEB, watched(), 5.0)
    removed.update(WEB, watched(ONE), 8.0)
    assert removed.due() == math.inf
    removed.update(WEB, watched(), 9.0)
    assert removed.due() == 19.0


def leaving(*endpoints: object, usable: object = ()) -> Watched:
    """Both are listed, and these terminate: connections are reset 25 s after that began."""
    return watched(ONE, OTHER)._replace(
        after_terminating=25.0,
        terminating=frozenset(endpoints),  # type: ignore[arg-type]
        usable=frozenset(usable),  # type: ignore[call-overload]
    )


def test_a_terminating_endpoint_is_due_some_time_after_that_began_and_once() -> None:
    removed = serving(ONE, OTHER)
    removed.update(WEB, leaving(ONE), 5.0)
    removed.update(WEB, leaving(ONE), 6.0)
    assert removed.due() == 30.0
    assert removed.take_due(30.0) == [Gone(WEB, ONE, frozenset({VIP}), 5.0, terminating=True)]
    assert removed.due() == math.inf


def test_a_terminating_endpoint_that_gets_new_connections_is_due_once_others_do() -> None:
    removed = serving(ONE, OTHER)
    removed.update(WEB, leaving(ONE, usable=[ONE]), 5.0)
    assert removed.due() == math.inf and not removed.take_due(100.0)
    removed.update(WEB, leaving(ONE, usable=[OTHER]), 101.0)
    assert removed.due() == 30.0


def test_a_terminating_endpoint_that_is_removed_gets_the_grace_of_removed_ones() -> None:
    removed = serving(ONE, OTHER)
    removed.update(WEB, leaving(ONE), 5.0)
    removed.update(WEB, watched(OTHER), 9.0)
    assert removed.take_due(19.0) == gone(ONE, since=9.0)


def test_an_endpoint_that_does_not_terminate_after_all_is_forgotten() -> None:
    removed = serving(ONE, OTHER)
    removed.update(WEB, leaving(ONE), 5.0)
    [due] = removed.take_due(30.0)
    assert removed.is_gone(due)
    removed.update(WEB, leaving(), 31.0)
    assert removed.due() == math.inf and not removed.is_gone(due)


def test_a_service_that_keeps_its_connections_now_is_forgotten() -> None:
    removed = serving(ONE)
    removed.update(WEB, watched(), 5.0)
    removed.update(WEB, None, 6.0)
    assert removed.due() == math.inf and not removed.watched


def test_one_that_is_due_is_gone_until_it_is_listed_again_or_kept() -> None:
    """A due endpoint is gone until it is listed or kept again.

    Later passes spare new connections.
    """
    for change in (watched(ONE), None):
        removed = serving(ONE)
        removed.update(WEB, watched(), 5.0)
        (found,) = removed.take_due(15.0)
        assert removed.is_gone(found)
        removed.update(WEB, change, 16.0)
        assert not removed.is_gone(found)
        removed.update(WEB, watched(), 17.0)
        assert not removed.is_gone(found)
    removed = serving(ONE)
    removed.update(WEB, DELETED, 5.0)
    (found,) = removed.take_due(15.0)
    assert removed.is_gone(found)
    removed.done([found])
    assert not removed.is_gone(found)


def test_the_end_of_an_earlier_removal_is_not_that_of_a_later_one() -> None:
    """An endpoint that came back and went again within the passes has a new end."""
    removed = serving(ONE)
    removed.update(WEB, watched(), 5.0)
    earlier = removed.take_due(15.0)
    removed.update(WEB, watched(ONE), 16.0)
    removed.update(WEB, watched(), 17.0)
    (later,) = removed.take_due(27.0)
    assert not any(map(removed.is_gone, earlier))
    removed.done(earlier)
    assert removed.is_gone(later)


def test_a_deleted_service_loses_all_endpoints_and_is_known_until_they_are_due() -> None:
    removed = serving(ONE)
    assert not removed.update(WEB, DELETED, 5.0)
    assert [*removed.by_frontend()] == [(VIP, WEB)]
    assert removed.take_due(15.0) == gone(ONE)
    assert not removed.watched


def test_a_service_that_is_created_again_within_the_grace_has_its_endpoints_back() -> None:
    removed = serving(ONE, OTHER)
    removed.update(WEB, DELETED, 5.0)
    removed.update(WEB, watched(OTHER), 6.0)
    assert removed.take_due(100.0) == gone(ONE)
    assert removed.watched == {WEB: watched(OTHER)}


def test_what_went_without_an_agent_has_its_grace_from_when_it_is_found() -> None:
    """An endpoint that went without an agent has its grace from the time when that is found.

    Its Service may exist, or have been deleted meanwhile.
    """
    for change in (watched(OTHER), None):
        removed = RemovedEndpoints({WEB: watched()})
        if change:
            assert removed.update(WEB, change, 50.0)
            assert not removed.loaded(50.0)
        else:
            assert removed.loaded(50.0)
        removed.found(WEB, ONE, 51.0)
        removed.found(WEB, ONE, 55.0)
        assert removed.take_due(61.0) == gone(ONE, since=51.0)
        removed.found(WEB, OTHER, 62.0)
        assert removed.due() == math.inf


def test_a_deleted_service_without_connections_is_forgotten() -> None:
    removed = RemovedEndpoints({WEB: watched()})
    removed.loaded(50.0)
    removed.forget_deleted()
    assert not removed.watched


def test_the_next_agent_reads_what_this_one_has_written() -> None:
    six = Watched(0.5, frozenset({Frontend(ip_address("fd00:96::1"), 53, 6)}))
    removed = serving(ONE)
    removed.update(DNS, six, 0.0)
    text = msgspec.json.encode(removed.watched.saved)
    read = restore_watched(msgspec.json.decode(text, type=tuple[WatchedPort, ...]))
    assert read == {WEB: watched(), DNS: six}


def test_what_is_written_for_the_next_agent_is_made_anew_of_what_has_changed_alone() -> None:
    """Only changed service ports are written for the next agent.

    Changes of endpoints cause no writing: the next agent knows them from their slices.
    """
    removed = serving(ONE)
    removed.update(DNS, watched(OTHER), 0.0)
    before = removed.watched.saved
    removed.update(WEB, watched(OTHER), 1.0)
    removed.take_due(20.0)
    assert removed.watched.saved is before
    removed.update(WEB, watched(OTHER, grace=3.0), 30.0)
    (web, dns), (former_web, former_dns) = removed.watched.saved, before
    assert dns is former_dns
    assert (web.grace, former_web.grace) == (3.0, 10.0)
    removed.update(DNS, DELETED, 40.0)
    removed.take_due(60.0)
    assert removed.watched.saved == (web,)


def test_a_namespace_has_a_limit() -> None:
    """The removals beyond it are not noted, until others are over; other namespaces have theirs."""
    endpoints = [(ip_address(0x0A000000 + number), 8080) for number in range(MOST_REMOVED + 1)]
    removed = serving(*endpoints)
    removed.update(WEB, watched(), 5.0)
    other = WEB._replace(namespace="other")
    removed.update(other, watched(ONE), 5.0)
    removed.update(other, watched(), 6.0)
    assert len(removed.take_due(15.0)) == MOST_REMOVED
    assert [each.service for each in removed.take_due(16.0)] == [other]
    removed.update(WEB, watched(ONE, OTHER), 20.0)
    removed.update(WEB, watched(OTHER), 21.0)
    assert [each.endpoint for each in removed.take_due(31.0)] == [ONE]
