# SPDX-License-Identifier: Apache-2.0
"""Rules in raw are noticed when they change, and are not read more often."""

import os
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import firewall, untracked
from ebpflb.kernel.netfilter.untracked import UntrackedWatch
from ebpflb.model.facts import Observed
from ebpflb.model.nodes import Destination, Rules
from tests.kernel.node import nodes
from tests.kernel.node.nodes import run

NAME = f"ebpflb-test-{os.getpid()}-untracked"
RULE = ["-d", "10.96.0.10/32", "-p", "udp", "--dport", "53", "-j", "NOTRACK"]
TOOLS = ["iptables-legacy", "iptables-nft"]
OTHERS = "table inet other { chain c { type filter hook forward priority 0; }; }"


class Watched:
    """The watch with the test's clock; ``reads`` counts runs of the tools."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reads = 0.0, 0
        self.emitted: list[Observed] = []
        self.watch = UntrackedWatch(self.emitted.append, clock=lambda: self.now)
        read = untracked.untracked_now

        def counted(unread: list[str]) -> frozenset[Destination]:
            self.reads += 1
            return read(unread)

        monkeypatch.setattr(untracked, "untracked_now", counted)

    def turn(self) -> list[bool]:
        """Take a turn; for each of its messages, return whether DNS is exempt."""
        self.emitted.clear()
        self.watch.turn()
        rules = (Rules(each.values) for each in self.emitted)
        return [bool(each.find(ip_address("10.96.0.10"), 53, 17)) for each in rules]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    with nodes.fresh(NAME):
        yield Watched(monkeypatch)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_change_is_noticed(watched: Watched, tool: str) -> None:
    assert watched.turn() == []
    run(tool, "-t", "raw", "-A", "PREROUTING", *RULE)
    assert watched.turn() == [True]
    run(tool, "-t", "raw", "-D", "PREROUTING", *RULE)
    assert watched.turn() == [False]


def test_rules_are_read_after_their_change_only(watched: Watched) -> None:
    """A change elsewhere causes no reading. While there are rules they are read each minute,
    because of named sets.
    """
    for _ in range(3):
        watched.turn()
    run("nft", OTHERS)
    watched.turn()
    watched.now = 1e6
    watched.turn()
    assert watched.reads == 1
    run("iptables-nft", "-t", "raw", "-A", "PREROUTING", *RULE)
    for _ in range(3):
        watched.turn()
    assert watched.reads == 2
    watched.now += 60.0
    watched.turn()
    assert watched.reads == 3


def test_what_cannot_be_read_any_more_still_counts(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the tool fails an error is emitted, and the last rules still count."""
    run("iptables-nft", "-t", "raw", "-A", "PREROUTING", *RULE)
    assert watched.turn() == [True]

    def fails(*_: object) -> None:
        raise NodeError("it crashes")

    monkeypatch.setattr(firewall, "run", fails)
    watched.now = 1e6
    assert watched.turn() == []
    assert "rules in raw, which may exempt Services from ebpflb: it crashes" in caplog.text
