# SPDX-License-Identifier: Apache-2.0
"""Entries of flows whose first packet was dropped go, though no further flow is opened."""

import os
import socket
import time
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from ebpflb.agent.dropped_openings import NOTE_LOST_FOR, DroppedOpenings
from ebpflb.datapath.maps import layout
from ebpflb.datapath.maps.bpf_map import Map, create_map, open_map
from ebpflb.datapath.maps.records import Opening, OpeningCounts
from ebpflb.model.services import Protocol
from ebpflb.node import ctnetlink
from ebpflb.plan.flow_entries import Tuple
from tests.node import nodes
from tests.node.nodes import run

NAME = f"ebpflb-test-{os.getpid()}-dropped"
CLIENT, SERVICE, PORT = ip_address("127.0.0.1"), ip_address("127.0.0.7"), 53
TRACKED = "table ip t {\n chain c {\n type filter hook output priority 0\n ct state new\n }\n}"


@pytest.fixture
def maps() -> Iterator[dict[str, Map]]:
    names = ("openings", "opening_counts")
    made = {n: open_map(layout.MAPS[n], create_map(layout.MAPS[n])) for n in names}
    with nodes.fresh(NAME):
        run("ip", "link", "set", "lo", "up")
        run("nft", "-f", "-", said=TRACKED)
        yield made
    for each in made.values():
        each.close()


def send(source: int) -> Tuple:
    """A datagram that conntrack has seen, and the flow that a program would have opened for it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.bind((str(CLIENT), source))
        client.sendto(b"?", (str(SERVICE), PORT))
    return Tuple(CLIENT, SERVICE, source, PORT, Protocol.UDP, 0)


def sources() -> set[int]:
    return {it.original.source_port for it in ctnetlink.connections(lambda *_: True)}


def test_what_was_dropped_goes_and_nothing_else(maps: dict[str, Map]) -> None:
    """What has left, what is too young, and what was seen by an earlier sweep stays."""
    now = time.monotonic_ns()
    places = {
        0: Opening(send(4000), now - 100, 1, 1, 0, 0),
        7: Opening(send(4001), now - 100, 1, 1, 1, 0),
        4095: Opening(send(4002), now + 100, 1, 1, 0, 0),
        8: Opening(Tuple(CLIENT, SERVICE, 4003, PORT, 99, 0), now - 100, 1, 1, 0, 0),
    }
    maps["openings"].write(list(places.items()))
    sweeper = DroppedOpenings(maps)
    assert sources() == {4000, 4001, 4002}
    assert sweeper.sweep(now) == 1
    assert sources() == {4001, 4002}
    send(4000)
    assert sweeper.sweep(now) == 0
    assert sweeper.sweep(now + 200) == 1
    assert sources() == {4000, 4001}


def answered(source: int) -> Tuple:
    """A flow whose datagram a server has answered."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((str(SERVICE), PORT))
        found = send(source)
        _, client = server.recvfrom(64)
        server.sendto(b"!", client)
    return found


def test_what_was_answered_stays(maps: dict[str, Map]) -> None:
    """A later packet of the flow has come through."""
    found = answered(4000)
    now = time.monotonic_ns()
    maps["openings"].write([(0, Opening(found, now, 1, 1, 0, 0))])
    assert DroppedOpenings(maps).sweep(now) == 0
    assert sources() == {4000}


def test_nothing_goes_where_it_shows_that_egress_notes_nothing(maps: dict[str, Map]) -> None:
    """An answer to what has not left shows it, to this sweep and to the next ones, for a while."""
    found, silent, now = answered(4000), send(4001), time.monotonic_ns()
    maps["openings"].write(
        [(0, Opening(found, now, 1, 1, 0, 0)), (1, Opening(silent, now, 1, 1, 0, 0))]
    )
    sweeper = DroppedOpenings(maps)
    assert sweeper.sweep(now) == 0
    maps["openings"].write([(1, Opening(silent, now + 1, 1, 1, 0, 0))])
    assert sweeper.sweep(now + NOTE_LOST_FOR - 1) == 0
    maps["openings"].write([(1, Opening(silent, now + NOTE_LOST_FOR, 1, 1, 0, 0))])
    assert sweeper.sweep(now + NOTE_LOST_FOR) == 1
    assert sources() == {4000}


def test_what_the_programs_have_seen_counts(maps: dict[str, Map]) -> None:
    """They look at each flow whose place another one takes."""
    silent, now = send(4000), time.monotonic_ns()
    maps["openings"].write([(0, Opening(silent, now, 1, 1, 0, 0))])
    maps["opening_counts"].write([(0, OpeningCounts(1, 0, now))])
    assert DroppedOpenings(maps).sweep(now) == 0
    assert sources() == {4000}


def test_nobody_is_asked_about_no_flows(
    maps: dict[str, Map], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node whose flows go by the flow tables may lack conntrack's netlink."""

    def refuse(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(ctnetlink, "find", refuse)
    monkeypatch.setattr(ctnetlink, "delete", refuse)
    assert DroppedOpenings(maps).sweep(time.monotonic_ns()) == 0
