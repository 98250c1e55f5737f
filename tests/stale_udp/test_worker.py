# SPDX-License-Identifier: Apache-2.0
"""When sockets are looked for, which are found and ended, and what is said."""

import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ebpflb.errors import KernelError
from ebpflb.model.addresses import Family
from ebpflb.node import sock_diag
from ebpflb.node.sock_diag import SockDiag
from ebpflb.plan.entries import Backend
from ebpflb.plan.stale import Stale
from ebpflb.stale_udp.worker import Cure
from tests.datapath.variants import eventually, needs_root
from tests.stale_udp.world import (
    ELSEWHERE,
    ENDED,
    HERE,
    OLD,
    SERVICE,
    World,
    error_of,
    is_ended,
    settle,
)  # fmt: skip

pytestmark = [
    needs_root,
    pytest.mark.skipif(not sock_diag.can_destroy(), reason="this kernel ends no sockets"),
]


def test_ended(world: World) -> None:
    """The socket that was translated is ended and forgotten; those that were not live."""
    client, direct, loose = world.remember(world.direct()), world.direct(), world.open()
    world.cure.ended(ENDED)
    assert is_ended(client)
    settle(world)
    assert error_of(direct) == error_of(loose) == 0
    assert not world.known
    assert world.cured[:2] == [(Family.IPV4, 1), (Family.IPV6, 0)]


def test_connected_elsewhere(world: World) -> None:
    """A socket that has been connected to another peer since is left alone."""
    client = world.remember(world.direct())
    client.connect((str(HERE), 1))
    world.cure.ended(ENDED)
    settle(world)
    assert error_of(client) == 0
    assert world.known


@pytest.mark.parametrize("counters", [(0, 0), (5, 5)])
def test_nobody_holds_it(world: World, counters: tuple[int, int]) -> None:
    """Where the counters say that no socket is left, nothing is searched."""
    client = world.remember(world.direct())
    world.count(OLD, *counters)
    world.cure.ended(ENDED)
    settle(world)
    assert world.walks == 0
    assert error_of(client) == 0
    world.cure.survey()
    assert is_ended(client)


def test_no_stale_socket(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the map names no stale socket, no namespace is entered."""
    world.serve(ELSEWHERE, Backend(HERE, world.port, frozenset({"cluster"}), OLD, SERVICE))
    client = world.remember(world.direct())
    world.cure.survey()
    settle(world)
    assert world.walks == 0
    assert error_of(client) == 0


def test_another_id(world: World) -> None:
    """A backend that serves again under another id is no former one."""
    world.serve(Backend(HERE, world.port, frozenset({"cluster"}), 11, SERVICE))
    client = world.remember(world.direct())
    world.cure.survey()
    settle(world)
    assert error_of(client) == 0


def test_orphaned_and_revived(world: World) -> None:
    """Who has nobody left waits until somebody serves; without the likes of it nobody looks."""
    world.cure.survey()
    settle(world)
    world.cure.ended(Stale(revived=True))
    settle(world)
    world.serve()
    client = world.remember(world.direct())
    world.cure.ended(Stale(orphaned=frozenset({OLD})))
    settle(world)
    assert (error_of(client), world.walks) == (0, 0)
    world.serve(ELSEWHERE)
    world.cure.ended(Stale(revived=True))
    assert is_ended(client)


def test_second_look(world: World) -> None:
    """A socket that was on its way through a hook at the first look is found by the second."""
    client = world.direct()
    world.cure.on_cured = lambda *_: world.remember(client)  # after the first look
    world.cure.ended(ENDED)
    assert is_ended(client)


def test_late(world: World) -> None:
    """Looks that are due while one is taken become one: what is stale for any of them is found."""
    begun, go_on = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        begun.set()
        assert go_on.wait(5)

    world.remember(world.open())
    world.cure.on_cured = hold
    world.cure.ended(ENDED)
    assert begun.wait(5)
    client = world.remember(world.direct())
    walks = world.walks
    for number in range(1, 10):
        world.cure.ended(Stale(ended=frozenset({OLD + number})))
        world.cure.ended(ENDED)
    go_on.set()
    assert is_ended(client)
    settle(world)
    assert world.walks <= walks + 3, "once for all first looks, once for their second ones"


def test_sought_in_vain(world: World) -> None:
    """A stale socket without a peer is looked for twice, and not again for others' sake."""
    world.remember(world.open())
    world.cure.ended(ENDED)
    settle(world)
    assert world.walks == 2
    client = world.direct()
    world.cure.ended(ENDED)
    settle(world)
    assert world.walks == 2
    assert len(world.cure._forgone) == 1
    world.maps["sockets"].delete([peer for peer, _ in world.maps["sockets"].items()])
    world.remember(client)
    world.cure.ended(ENDED)
    assert is_ended(client)
    settle(world)
    assert not world.cure._forgone


def test_walk_ends(world: World) -> None:
    """When the last socket is found no more namespaces are entered."""
    entered: list[int] = []

    def each(what: Callable[[], SockDiag]) -> Iterator[tuple[bool, SockDiag]]:
        for number in range(3):
            entered.append(number)
            yield number == 0, what()

    world.cure.mover.each = each
    client = world.remember(world.direct())
    world.cure.ended(ENDED)
    assert is_ended(client)
    settle(world)
    assert entered == [0]


def test_failure(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """What fails is said, and the next look is taken."""
    client, slices = world.remember(world.direct()), world.maps["sockets"].slices

    def refuse(*_words: Any) -> Any:
        raise KernelError("map", errno.ENOSPC, "no space")

    world.maps["sockets"].slices = refuse  # type: ignore[method-assign]
    world.cure.ended(ENDED)
    assert eventually(lambda: caplog.text.count("stale UDP flows cannot be moved: map") == 2)
    world.maps["sockets"].slices = slices  # type: ignore[method-assign]
    world.cure.ended(ENDED)
    assert is_ended(client)


def test_never_started(world: World) -> None:
    """An agent that failed before may stop it all the same."""
    Cure(world.maps, world.each).stop()


@pytest.mark.parametrize("lists", [True, False])
def test_said_at_start(
    world: World, lists: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a kernel lacks is said once, with what is lost."""
    monkeypatch.setattr(sock_diag, "can_destroy", lambda: False)
    monkeypatch.setattr(sock_diag, "can_list", lambda: lists)
    cure = Cure(world.maps, world.each)
    cure.start()
    cure.stop()
    assert not cure.supported
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert ("re-bound" in said) == lists
    assert ("modprobe udp_diag" in said) != lists
