# SPDX-License-Identifier: Apache-2.0
"""Sockets that are gone without a release by the kernel are forgotten; all other sockets stay."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from ebpflb.agent.missed_ends import UnreleasedSockets
from ebpflb.entries.services import Frontend
from ebpflb.kernel.maps import bpf_map, layout, state_dir
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import PeerFrontend, SocketEntry
from ebpflb.kernel.node.namespaces import own_cookie
from tests.kernel.maps.small import small_maps, write_elsewhere

NAMES = (
    "settings", "services", "socket_places", "sockets", "sockets_full", "assignments", "peers",
    "slots", "backend_slots", "verdicts", "connections", "backend_loads",
)  # fmt: skip
HERE, VIP = ip_address("127.0.0.1"), ip_address("10.96.0.10")
BACKEND, SERVICE = 10, 1
NOWHERE = 1 << 60  # no socket and no namespace has this cookie


@pytest.fixture
def maps() -> Iterator[dict[str, Map]]:
    """Return maps whose counters have full size, because the programs index them by CPU."""
    spec = layout.MAPS["backend_stats"]
    counters = bpf_map.open_map(spec, state_dir.create_map(spec))
    with small_maps(NAMES) as made, closing(counters):
        yield made | {spec.name: counters}


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def each(what: Callable[[], Any]) -> Iterator[Any]:
    """Visit only our own namespace."""
    yield what()


@pytest.fixture
def sweeper(maps: dict[str, Map], tmp_path: Path) -> Iterator[UnreleasedSockets]:
    made = UnreleasedSockets(maps, tmp_path, each)
    yield made
    made.stop()


def own_netns() -> int:
    cookie = own_cookie()
    if cookie is None:
        pytest.skip("the kernel does not tell a namespace's cookie (5.14)")
    return cookie


def remember(maps: dict[str, Map], cookie: int, protocol: int, netns: int, counted: int = 0) -> int:
    """Remember a socket as the hooks do."""
    peer = PeerFrontend(Frontend(VIP, 80, protocol), BACKEND, HERE, 8080)
    write_elsewhere(maps, cookie, SocketEntry(peer, SERVICE, netns=netns, counted=counted))
    return cookie


def cookie_of(one: socket.socket) -> int:
    return int.from_bytes(one.getsockopt(socket.SOL_SOCKET, 57, 8), "little")


def known(maps: dict[str, Map]) -> set[int]:
    return {cookie for cookie, _ in maps["sockets"].items()}


def test_gone_sockets_are_forgotten(
    maps: dict[str, Map], sweeper: UnreleasedSockets, opened: ExitStack
) -> None:
    """A socket that the kernel lists in neither of two sweeps is forgotten, and counts as
    closed.
    """
    netns, alive = own_netns(), set()
    listening = opened.enter_context(socket.create_server((str(HERE), 0)))
    for protocol, kind in ((6, socket.SOCK_STREAM), (17, socket.SOCK_DGRAM)):
        client = opened.enter_context(socket.socket(socket.AF_INET, kind))
        client.connect(listening.getsockname())
        alive.add(remember(maps, cookie_of(client), protocol, netns))
    sender = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    sender.sendto(b"", listening.getsockname())
    alive.add(remember(maps, cookie_of(sender), 17, netns))
    gone = {remember(maps, NOWHERE + n, protocol, netns) for n, protocol in ((1, 6), (2, 17))}
    assert sweeper.sweep() == 0
    assert known(maps) == alive | gone
    assert sweeper.sweep() == len(gone)
    assert known(maps) == alive
    assert maps["backend_stats"].get(BACKEND) == (0, len(gone))
    assert sweeper.sweep() == 0


def test_namespace_that_is_gone(maps: dict[str, Map], sweeper: UnreleasedSockets) -> None:
    """A namespace that was entered once and no longer exists has no sockets."""
    remember(maps, 1, 6, own_netns())
    sweeper.sweep()
    sweeper.each_namespace = lambda _: iter(())
    assert sweeper.sweep() == 1
    assert known(maps) == set()
