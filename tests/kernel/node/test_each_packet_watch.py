# SPDX-License-Identifier: Apache-2.0
"""Rules that act on each packet are noticed when they are added, for --fast-forward=auto."""

import os
import socket
from collections.abc import Iterator
from socket import AF_INET, AF_INET6, SOCK_DGRAM
from typing import Any

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import each_packet
from ebpflb.kernel.netfilter.each_packet import QUIET_SECONDS, EachPacketWatch
from ebpflb.kernel.node import routes
from ebpflb.model.nodes import EachPacketRules
from ebpflb.workers import DescriptorWorker
from tests.kernel.node import nodes
from tests.kernel.node.nodes import run

NAME = f"ebpflb-test-{os.getpid()}-each-packet"
TABLE = (
    "table inet operator { chain c { type filter hook forward priority 0; tcp dport 1 accept; }; }"
)
TOOLS = ["iptables-legacy", "iptables-nft"]


class Watched:
    """The watch with the test's clock, without its thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reads = 0.0, 0
        self.emitted: list[EachPacketRules] = []
        self.all: list[EachPacketRules] = []
        monkeypatch.setattr(DescriptorWorker, "start", lambda _: None)
        self.watch: Any = EachPacketWatch(self.emitted.append, clock=lambda: self.now)
        self.watch.start()
        read = each_packet.read_rules

        def counted() -> each_packet.Read:
            self.reads += 1
            return read()

        monkeypatch.setattr(each_packet, "read_rules", counted)

    @property
    def changes(self) -> int:
        """Return the changes of the last rules that were emitted."""
        return self.all[-1].changes

    def look(self, after: float = 2 * QUIET_SECONDS) -> list[tuple[str, ...]]:
        """Return what is emitted after this many seconds."""
        self.now += after
        self.emitted.clear()
        self.watch.look()
        self.all += self.emitted
        return [each.lines for each in self.emitted]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    with nodes.fresh(NAME):
        made = Watched(monkeypatch)
        assert made.look() == [()]
        yield made
        made.watch.stop()


CAN_DROP = ": can drop packets of open connections"


@pytest.mark.parametrize(
    ("command", "ends"),
    [
        ("add rule inet operator c tcp dport 2 drop", CAN_DROP),
        ("add chain inet operator c { policy drop; }", ": its policy drops what no rule accepts"),
        ("add element inet operator fates { 192.0.2.1 : drop }", CAN_DROP),
        ("add element inet operator friends { 192.0.2.1 }", ""),
        ("flush chain inet operator c", ""),
    ],
)
def test_what_open_connections_meet(watched: Watched, command: str, ends: str) -> None:
    """A rule, policy or element of a set that appears counts as a change before the rules are read,
    and what can drop is named then.
    """
    run("nft", TABLE)
    run("nft", "add set inet operator friends { type ipv4_addr; }")
    run("nft", "add map inet operator fates { type ipv4_addr : verdict; }")
    run("nft", "add rule inet operator c ip saddr @friends accept")
    run("nft", "add rule inet operator c ip saddr vmap @fates")
    watched.look()
    before = watched.changes
    run("nft", command)
    first, *rest = watched.look()
    assert watched.emitted[0].changes == before + 1
    assert first == ()
    assert [line.endswith(ends) for (line,) in rest] == [True] * bool(ends)


def test_what_open_connections_do_not_meet(watched: Watched) -> None:
    """Rules in chains of other hooks do not count as a change."""
    run("nft", TABLE)
    run("nft", "add chain inet operator o { type filter hook output priority 0; }")
    watched.look()
    before = watched.changes
    run("nft", "add rule inet operator o tcp dport 4 drop")
    watched.look()
    assert watched.changes == before


@pytest.mark.parametrize("tool", TOOLS)
def test_a_rule_of_iptables(watched: Watched, tool: str) -> None:
    """iptables-legacy sends no message, but its tables are looked at. Counts are no change."""
    run("ip", "link", "set", "lo", "up")
    for family, address in ((tool, "127.0.0.1"), (tool.replace("iptables", "ip6tables"), "::1")):
        run(family, "-A", "FORWARD", "-j", "ACCEPT")
        watched.look()
        with socket.socket(AF_INET6 if ":" in address else AF_INET, SOCK_DGRAM) as sender:
            sender.sendto(b"counted", (address, 9))
        assert watched.look() == []
        run(family, "-R", "FORWARD", "1", "-j", "DROP")
        _, (line,) = watched.look()
        assert line.endswith(CAN_DROP)
        run(family, "-F", "FORWARD")
        watched.look()
    run(tool, "-A", "FORWARD", "-j", "LOG")
    _, (line,) = watched.look()
    assert "logs each packet" in line
    run(tool, "-D", "FORWARD", "-j", "LOG")
    assert watched.look() == [()]


DROPPING = "-p", "tcp", "-m", "conntrack", "--ctstate", "INVALID", "-j", "DROP"


@pytest.mark.parametrize("tool", TOOLS)
def test_a_rule_for_invalid_packets(watched: Watched, tool: str) -> None:
    """It is named at once when it appears, at any hook, and while rules keep changing they are
    unknown.
    """
    assert watched.all[-1].invalid == ""
    run(tool, "-A", "INPUT", *DROPPING)
    watched.look()
    assert watched.all[-1].invalid.endswith("asks for ct state invalid")
    run(tool, "-D", "INPUT", *DROPPING)
    watched.look(after=1)
    assert watched.all[-1].invalid == "the rules are changing"
    watched.look()
    assert watched.all[-1].invalid == ""


@pytest.mark.parametrize("family", ["-4", "-6"])
def test_a_routing_rule_by_mark(watched: Watched, family: str) -> None:
    run("ip", family, "rule", "add", "fwmark", "0x9", "lookup", "7")
    assert watched.look() == [("ip rule: fwmark 0x9",)]
    run("ip", family, "rule", "del", "fwmark", "0x9", "lookup", "7")
    assert watched.look() == [()]


WAYS = [
    ("route replace blackhole 198.51.100.1/32", 0),
    ("neigh replace 192.0.2.7 lladdr 02:00:00:00:00:02 dev own", 0),
    ("link set own mtu 1300", 1),
    ("link add other type bridge", 0),
    ("link set other up", 0),
    ("link set port master other", 1),
    ("route replace blackhole 198.51.100.2/32", 1),
    ("neigh replace 192.0.2.7 lladdr 02:00:00:00:00:02 dev own", 0),
    ("neigh replace 192.0.2.7 lladdr 02:00:00:00:00:01 dev own", 1),
    ("neigh replace 192.0.2.8 lladdr 02:00:00:00:00:01 dev own", 0),
    ("link set own address 02:00:00:00:00:03", 1),
    ("link set own alias other", 0),
    ("address add 192.0.2.2/24 dev own", 0),
    ("route delete 192.0.2.0/24", 1),
]


def test_the_ways_of_open_connections(watched: Watched) -> None:
    """A device that becomes another one counts as a change, and causes no reading; so does a route
    or a neighbour, once a bridge has a port. What is new or said again does not count.
    """
    for name in ("own", "port"):
        run("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}-end")
        run("ip", "link", "set", name, "addrgenmode", "none", "up")
    run("ip", "address", "add", "192.0.2.1/24", "dev", "own")
    run("ip", "neigh", "add", "192.0.2.7", "lladdr", "02:00:00:00:00:01", "dev", "own")
    watched.look()
    reads = watched.reads
    for command, count in WAYS:
        before = watched.changes
        run("ip", *command.split())
        watched.look(after=2)
        assert watched.changes == before + count, command
    assert watched.reads == reads


@pytest.fixture
def bridged(watched: Watched) -> Watched:
    run("ip", "link", "add", "other", "type", "bridge")
    run("ip", "link", "add", "port", "up", "master", "other", "type", "veth", "peer", "name", "end")
    for _ in range(2):
        watched.look()
    return watched


def test_ways_that_keep_changing(bridged: Watched) -> None:
    """They count once a second, and the last one counts too."""
    watched, before = bridged, bridged.changes
    for command in ("add", "delete", "add"):
        run("ip", "route", command, "blackhole", "198.51.100.1/32")
        watched.look(after=0.25)
    watched.look(after=1)
    watched.look(after=1)
    assert watched.changes == before + 2


def test_more_changes_of_ways_than_are_told(bridged: Watched) -> None:
    """As a pod can cause them: they count once, and rules do not count as changing. What is new is
    none again, after a minute.
    """
    watched, before = bridged, bridged.changes
    lines = [f"route add blackhole 198.18.{at >> 8}.{at & 255}/32" for at in range(3000)]
    for _ in range(2):
        run("ip", "-batch", "-", said="\n".join(lines))
        lines = [it.replace("add", "delete") for it in lines]
        watched.look(after=2)
    assert watched.changes == before + 2 and watched.all[-1].lines == ()
    watched.look(after=60)
    watched.look(after=2)
    before = watched.changes
    run("ip", "link", "add", "new", "up", "type", "veth", "peer", "name", "new-end")
    watched.look(after=2)
    assert watched.changes == before


def test_rules_that_keep_changing(watched: Watched) -> None:
    """While rules keep changing they count as unknown, and are not read."""
    run("nft", TABLE)
    assert watched.look() == [()]
    reads = watched.reads
    for emitted in ([(), ("the rules are changing",)], [], []):
        run("nft", "add rule inet operator c tcp dport 2 accept")
        assert watched.look(after=1) == emitted
    assert watched.reads == reads
    assert watched.look(after=QUIET_SECONDS) == [()]
    assert watched.reads == reads + 1


def test_what_says_nothing_is_not_read(watched: Watched) -> None:
    """A change of a set's elements, or of a table of ebpflb or kube-proxy, causes no reading; all
    rules are read each minute.
    """
    run("nft", "table ip tenant { set s { type ipv4_addr; }; }")
    watched.look()
    reads = watched.reads
    for words in (
        "add element ip tenant s { 192.0.2.1 }",
        "table inet ebpflb { chain c { type filter hook forward priority 0; counter; }; }",
        "table ip kube-proxy { chain c { type filter hook forward priority 0; counter; }; }",
    ):
        run("nft", words)
        assert watched.look() == []
    assert watched.reads == reads
    watched.look(after=60)
    assert watched.reads == reads + 1


def test_what_cannot_be_read_counts_as_such_a_rule(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> set[int]:
        raise NodeError("no right to read them")

    monkeypatch.setattr(routes, "rule_marks", fails)
    run("nft", TABLE)
    why = "the firewall rules cannot be read: no right to read them"
    assert watched.look() == [(), (why,)]
    assert watched.all[-1].invalid == why


def test_rules_of_a_missing_tool_count_as_such_a_rule(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("nft", TABLE)
    monkeypatch.setenv("PATH", "/nowhere")
    watched.look()
    assert watched.all[-1].invalid == "nft: it has rules, and nft is not installed here"
