# SPDX-License-Identifier: Apache-2.0
"""Which API servers do not answer this node, as the watch reports it.

tests/network/test_api_servers.py has one whose machine is gone.
"""

from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from ebpflb.agent.api_servers import MOST, ApiServerWatch
from ebpflb.model.api_servers import Place
from tests.kit.api_server import WAIT_SECONDS, FakeApiServer
from tests.kit.certificates import self_signed

HERE = "127.0.0.1"


class Watched:
    """A watch and what it reports."""

    def __init__(self) -> None:
        self.reports: SimpleQueue[frozenset[Place]] = SimpleQueue()
        self.watch = ApiServerWatch(self.reports.put)

    def next(self) -> frozenset[Place]:
        return self.reports.get(timeout=WAIT_SECONDS)


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.watch.stop()


def port_of(api: FakeApiServer) -> int:
    return int(api.url.rpartition(":")[2])


@pytest.mark.parametrize("tls", [True, False])
def test_one_that_ends_is_silent_until_it_answers(
    watched: Watched, tmp_path: Path, tls: bool
) -> None:
    """Any answer counts, also one without TLS."""
    certificate = self_signed(tmp_path, "DNS:another") if tls else None
    with FakeApiServer(certificate=certificate) as api, FakeApiServer() as other:
        places = {(HERE, port_of(api)), (HERE, port_of(other))}
        watched.watch.set(places)
    for each in (api, other):
        each.hang_up()
    gone = watched.next() | watched.next()
    assert gone == places
    with FakeApiServer(certificate=certificate, port=port_of(api)):
        assert watched.next() == {(HERE, port_of(other))}


def test_one_that_is_watched_no_longer_is_not_silent(watched: Watched) -> None:
    with FakeApiServer() as api:
        place = HERE, port_of(api)
    watched.watch.set([place])
    assert watched.next() == {place}
    watched.watch.set([])
    assert watched.next() == frozenset()


def test_a_bounded_number_is_watched(watched: Watched) -> None:
    with FakeApiServer() as api:
        closed = port_of(api)
    watched.watch.set([(f"127.0.1.{number}", closed) for number in range(1, MOST + 9)])
    while len(silent := watched.next()) < MOST:
        pass
    watched.watch.stop()
    assert len(silent) == MOST
    assert watched.reports.empty()
