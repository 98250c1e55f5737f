# SPDX-License-Identifier: Apache-2.0
"""The conntrack engine's table is put back when others remove it, in a namespace of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from ebpflb.model.events import SourceStatus
from ebpflb.node import ctnetlink, nat, nft
from ebpflb.node.nat_watch import NatWatch
from tests.datapath.variants import eventually
from tests.node import nodes
from tests.node.nodes import run

NAME = f"ebpflb-test-{os.getpid()}-natwatch"
NEVER = 3600.0  # seconds: what a test sees was not a look at regular times
SERVICE, PORT = "127.0.0.7", 53
RENAMED = "delete table inet ebpflb-conntrack\nadd table inet ebpflb-conntrack\n"


@pytest.fixture(autouse=True)
def netns() -> Iterator[None]:
    with nodes.fresh(NAME):
        yield


@contextmanager
def started(watch: NatWatch) -> Iterator[NatWatch]:
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


@pytest.fixture
def watch() -> Iterator[NatWatch]:
    """It watches a table that the engine needs."""
    nat.keep_nat_hooks(nat.ENGINE)
    with started(NatWatch(lambda _: None, needed=lambda: True, seconds=NEVER)) as made:
        yield made


@pytest.mark.parametrize(
    "removal",
    [
        "flush ruleset",
        "delete table inet ebpflb-conntrack",
        "flush table inet ebpflb-conntrack",
        "flush chain inet ebpflb-conntrack hold\ndelete chain inet ebpflb-conntrack hold",
        RENAMED,
    ],
    ids=["ruleset", "table", "rules", "chain", "empty"],
)
def test_what_is_removed_is_put_back(
    watch: NatWatch, removal: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At once, whatever part of it was removed; it is counted, and the log names the table."""
    whole = run("nft", "list", "ruleset")
    for number in range(1, 4):
        run("nft", "-f", "-", said=f"{removal}\n")
        assert eventually(lambda times=number: watch.restored == times)
        assert run("nft", "list", "ruleset") == whole
    assert caplog.text.count("table inet ebpflb-conntrack had been removed") == 3


def test_other_tables_are_left_alone(watch: NatWatch) -> None:
    """What others remove of their own tables puts nothing back."""
    for _ in range(3):
        run("nft", "-f", "-", said="table ip mine {\n chain c {\n accept\n }\n}\n")
        run("nft", "delete", "table", "ip", "mine")
    nft.delete(nat.ENGINE)
    assert eventually(lambda: watch.restored == 1)


def test_it_stays_at_the_end() -> None:
    """The table stays when the agent ends, and the next agent has nothing to put back."""
    nat.keep_nat_hooks(nat.ENGINE)
    for _ in range(2):
        with started(NatWatch(lambda _: None, needed=lambda: True, seconds=NEVER)) as watch:
            pass
        assert nat.keeps_nat_hooks(nat.ENGINE)
        assert watch.restored == 0


def test_an_earlier_engines_table_goes_with_its_last_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the engine does not serve, the table stays as long as a connection is translated."""
    looks: list[bool] = []
    has_any = nat.has_dnat_connections

    def look() -> bool:
        looks.append(has_any())
        return looks[-1]

    monkeypatch.setattr(nat, "has_dnat_connections", look)
    nat.keep_nat_hooks(nat.ENGINE)
    nodes.translate(SERVICE, PORT)
    with started(NatWatch(lambda _: None, needed=lambda: False, seconds=0.01)):
        assert eventually(lambda: len(looks) > 3)
        assert nat.keeps_nat_hooks(nat.ENGINE)
        ctnetlink.delete(ctnetlink.connections(lambda *_: True))
        assert eventually(lambda: not nft.exists(nat.ENGINE))


def test_what_fails_is_reported_until_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is reported once, and its end."""
    monkeypatch.setattr("ebpflb.node.nat_watch._TABLE_RETRY_SECONDS", 0.01)
    told: SimpleQueue[SourceStatus] = SimpleQueue()
    with monkeypatch.context() as patched:
        patched.setattr(nft, "TABLE_FAMILIES", {"inet": 99})  # the kernel has no such family
        watch = NatWatch(told.put, needed=lambda: True, seconds=NEVER)
        watch.start()
        assert told.get(timeout=60).error
    assert told.get(timeout=60).error is None
    watch.stop()
    assert nat.keeps_nat_hooks(nat.ENGINE)


def test_report_only_puts_nothing_back() -> None:
    """With --audit=report it is known that the table is gone, and told at once; it stays so."""
    nat.keep_nat_hooks(nat.ENGINE)
    told: SimpleQueue[None] = SimpleQueue()
    watch = NatWatch(
        lambda _: None,
        needed=lambda: True,
        report_only=True,
        on_removed=lambda: told.put(None),
        seconds=NEVER,
    )
    with started(watch):
        nft.delete(nat.ENGINE)
        told.get(timeout=60)
        assert watch.lacking
        assert not nft.exists(nat.ENGINE)
        assert watch.restored == 0
