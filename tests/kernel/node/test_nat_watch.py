# SPDX-License-Identifier: Apache-2.0
"""The netfilter engine's table is restored when another program removes it, in a namespace of its
own.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from queue import SimpleQueue

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter.table import TABLE, TableOptions, remove
from ebpflb.kernel.netfilter.watch import NatWatch
from ebpflb.model.events import SourceStatus
from tests.kernel.node import nodes
from tests.kernel.node.nodes import run
from tests.kernel.variants import eventually
from tests.kit.descriptors import beyond_1023

pytestmark = pytest.mark.usefixtures("fresh_netns")
NEVER = 3600.0  # seconds: what a test sees was not a look at regular times
SERVICE, PORT = "127.0.0.7", 53
OPTIONS = TableOptions(0x4000, ((30000, 65535),), drops_invalid=True, sctp=True)


class Table:
    """The engine's table, which other programs can change; ``releases`` counts attempts to remove
    it.
    """

    def __init__(self) -> None:
        self._table = nodes.SharedTable(OPTIONS)
        self._table.build()
        self.releases = 0
        self.error: NodeError | None = None

    def close(self) -> None:
        self._table.close()

    def differences(self) -> list[str]:
        if self.error:
            raise self.error
        return self._table.differences()

    def restore(self) -> list[str]:
        lacking = self.differences()
        if lacking:
            self._table.build()
        return lacking

    def release(self) -> None:
        self.releases += 1
        remove()


@pytest.fixture
def table(fresh_netns: None) -> Iterator[Table]:
    with closing(Table()) as made:
        yield made


@contextmanager
def started(watch: NatWatch) -> Iterator[NatWatch]:
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


@pytest.fixture
def watch(table: Table) -> Iterator[NatWatch]:
    """Watch a table that the engine needs."""
    with started(NatWatch(lambda _: None, table, needed=lambda: True, seconds=NEVER)) as made:
        yield made


@pytest.mark.parametrize(
    "removal",
    [
        "flush ruleset",
        "delete table inet ebpflb",
        "flush table inet ebpflb",
        "flush chain inet ebpflb choose\ndelete chain inet ebpflb choose",
        "delete table inet ebpflb\nadd table inet ebpflb",
    ],
    ids=["ruleset", "table", "rules", "chain", "empty"],
)
def test_what_is_removed_is_put_back(
    watch: NatWatch, removal: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Any removed part is restored at once and counted, and the log names it."""
    whole = run("nft", "list", "ruleset")
    for number in range(1, 4):
        run("nft", "-f", "-", said=f"{removal}\n")
        assert eventually(lambda: watch.put_back == number)  # noqa: B023
        assert run("nft", "list", "ruleset") == whole
        assert watch.lacking == []
    assert caplog.text.count("put back what another program had removed: ") == 3


def test_an_earlier_engines_table_goes(table: Table) -> None:
    """If the engine does not serve, its table is removed."""
    with started(NatWatch(lambda _: None, table, needed=lambda: False, seconds=0.01)):
        assert eventually(lambda: table.releases > 3)


def test_nothing_is_done_before_the_engine_is_known(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the engine is known, the watch only asks again soon."""
    monkeypatch.setattr("ebpflb.kernel.netfilter.watch.TABLE_RETRY_SECONDS", 0.01)
    asked: list[None] = []

    def needed() -> bool | None:
        asked.append(None)
        return None if len(asked) < 20 else False

    nft.delete(TABLE)
    with started(NatWatch(lambda _: None, table, needed=needed, seconds=NEVER)):
        assert eventually(lambda: len(asked) > 10)
        assert eventually(lambda: table.releases == 1)


def test_what_fails_is_reported_until_it_works(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error is reported once, and so is its recovery."""
    monkeypatch.setattr("ebpflb.kernel.netfilter.watch.TABLE_RETRY_SECONDS", 0.01)
    told: SimpleQueue[SourceStatus] = SimpleQueue()
    table.error = NodeError("table inet ebpflb: busy")
    nft.delete(TABLE)
    with started(NatWatch(told.put, table, needed=lambda: True, seconds=NEVER)) as watch:
        assert told.get(timeout=60).error == "table inet ebpflb: busy"
        table.error = None
        assert told.get(timeout=60).error is None
        assert watch.put_back == 1
    assert told.empty()


def test_report_only_puts_nothing_back(table: Table) -> None:
    """With --audit=report the missing table is reported at once, and stays missing."""
    told: SimpleQueue[None] = SimpleQueue()
    watch = NatWatch(
        lambda _: None,
        table,
        needed=lambda: True,
        report_only=True,
        on_removed=lambda: told.put(None),
        seconds=NEVER,
    )
    with started(watch):
        nft.delete(TABLE)
        told.get(timeout=60)
        assert watch.lacking
        assert not nft.exists(TABLE)
        assert watch.put_back == 0


def test_with_many_open_files(table: Table) -> None:
    """The watch also works with descriptors beyond 1,023, which an agent with some 480 devices
    has.
    """
    with (
        beyond_1023(),
        started(NatWatch(lambda _: None, table, needed=lambda: True, seconds=NEVER)) as watch,
    ):
        run("nft", "flush", "ruleset")
        assert eventually(lambda: watch.put_back == 1)
