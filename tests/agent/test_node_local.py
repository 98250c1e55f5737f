# SPDX-License-Identifier: Apache-2.0
"""The agent probes node-local listeners, and plans by their answers."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ebpflb.agent import node_local
from ebpflb.agent.node_local import NodeLocalWatch, answering_in, ask
from ebpflb.model.annotations import NODE_LOCAL_ANNOTATION
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Kind
from ebpflb.model.facts import Fact, Observed
from ebpflb.model.nodes import Listener
from ebpflb.model.services import Protocol
from tests.agent.fakes import Harness, Json, lists, service

HERE, HERE6 = "127.0.0.1", "::1"


def listening(stack: ExitStack, host: str, protocol: Protocol) -> Listener:
    """Yield a socket for which the kernel answers (if it is TCP)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = socket.SOCK_STREAM if protocol is Protocol.TCP else socket.SOCK_DGRAM
    opened = stack.enter_context(socket.socket(family, kind))
    opened.bind((host, 0))
    if protocol is Protocol.TCP:
        opened.listen()
    return Listener(ip_address(host), opened.getsockname()[1], protocol)


@pytest.mark.parametrize("host", [HERE, HERE6])
def test_only_a_connection_is_an_answer(host: str) -> None:
    """A connection is an answer. Silence, a refusal, or an address of no device is not."""
    with ExitStack() as stack:
        tcp = listening(stack, host, Protocol.TCP)
        silent = listening(stack, host, Protocol.UDP)
        with ExitStack() as gone:
            refuses = [listening(gone, host, protocol) for protocol in (Protocol.TCP, Protocol.UDP)]
        elsewhere = tcp._replace(address=ip_address("2001:db8::1" if ":" in host else "192.0.2.1"))
        found = ask([tcp, silent, elsewhere, *refuses])
    assert found.pop(tcp) is None
    assert found.pop(silent) == ""
    assert "Cannot assign requested address" in (found.pop(elsewhere) or "")
    assert set(found.values()) == {"Connection refused"}


def test_the_query_is_one_for_dns() -> None:
    """The query asks for version.bind of class CHAOS."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((HERE, 0))
        server.settimeout(60)
        asked = Listener(ip_address(HERE), server.getsockname()[1], Protocol.UDP)
        assert ask([asked]) == {asked: ""}
        query, client = server.recvfrom(512)
    assert query[2:12] == bytes([0, 0, 0, 1, 0, 0, 0, 0, 0, 0])
    assert query[12:] == b"\7version\4bind\0\0\x10\0\3"
    assert client[0] == HERE


DNS = Listener(ip_address("169.254.20.10"), 53, Protocol.UDP)
DNS6 = Listener(ip_address("fd00::10"), 53, Protocol.TCP)
ANSWERS, NOBODY = [frozenset({DNS})], [frozenset[Listener]()]


class Asked:
    """A watch whose listeners answer as the test says; ``wanted`` are the listeners that Services
    name.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answering: Listener) -> None:
        self.heard: list[Observed] = []
        self.error: str | None = None
        self.cluster = ClusterState("node-1")
        self.cluster.listed.update(Kind)
        self.cluster.observe(Fact.ANSWERING_LISTENERS, frozenset(answering))
        self.wanted = frozenset[Listener]()
        inbox: Any = Mock(put=self.heard.append, ask=lambda do: do())
        self.watch = NodeLocalWatch(self.cluster, inbox)
        monkeypatch.setattr(node_local, "ask", lambda them: dict.fromkeys(them, self.error))
        monkeypatch.setattr(self.cluster.node_local, "take_wanted", self._take)

    def _take(self) -> frozenset[Listener]:
        self.cluster.node_local.changed = False
        return self.wanted

    def turn(self, error: str | None) -> list[frozenset[Listener]]:
        self.error, self.cluster.node_local.changed = error, True
        self.heard.clear()
        self.watch.turn()
        return [each.values for each in self.heard]


def test_silence_counts_twice_and_a_refusal_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    assert asked.turn(None) == []  # nothing is wanted yet
    asked.wanted = frozenset({DNS})
    assert [asked.turn(it) for it in ("", None, None)] == [[], ANSWERS, []]
    assert asked.watch.counts == {"answering": 1, "silent": 0}
    assert [asked.turn(it) for it in ("", None, "", "")] == [[], [], [], NOBODY]
    assert [asked.turn(it) for it in ("", None, "refused")] == [[], ANSWERS, NOBODY]
    assert asked.watch.counts == {"answering": 0, "silent": 1}
    asked.wanted = frozenset()
    assert asked.turn(None) == []
    assert not asked.watch.wanted.is_set()


def test_listeners_of_both_families_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DNS cache has an address of each family, and may answer by TCP too."""
    asked = Asked(monkeypatch)
    asked.wanted = both = frozenset({DNS, DNS6, DNS._replace(protocol=Protocol.TCP)})
    assert [asked.turn(it) for it in ("", None, "refused")] == [[], [both], NOBODY]


def test_an_earlier_agents_listener_serves_until_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = Asked(monkeypatch, DNS)
    asked.cluster.listed.clear()
    assert asked.turn("") == []
    asked.cluster.listed.update(Kind)
    asked.wanted = frozenset({DNS})
    assert [asked.turn(it) for it in ("", None)] == [[], []]
    asked.wanted = frozenset()
    assert asked.turn(None) == NOBODY


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[Harness]:
    """Return an agent that serves a Service with an endpoint."""
    made = Harness(tmp_path)
    made.options = replace(made.options, node_local_addresses=(DNS.address,))
    made.start()
    made.send(*lists(annotated("169.254.20.10"), "10.1.0.1"))
    yield made
    made.stop()
    assert made.error is None


def annotated(value: str) -> Json:
    return service("web", "10.96.0.1", {NODE_LOCAL_ANNOTATION: value})


def answering(*listeners: Listener) -> Observed:
    return Observed(Fact.ANSWERING_LISTENERS, frozenset(listeners))


def flags(harness: Harness) -> set[str]:
    """Return the flags of the cluster IP."""
    (entry,) = harness.datapath.maps.services.values()
    return set(entry.flags)


def test_the_listener_has_the_last_slot_while_it_answers(harness: Harness) -> None:
    """The listener gets the last slot; the endpoint stays in the lists, for packets."""
    (asked,) = harness.cluster.node_local.take_wanted()
    assert asked == Listener(DNS.address, 80, Protocol.TCP)
    assert "node_local" not in flags(harness)
    harness.send(answering(asked))
    assert "node_local" in flags(harness)
    (entry,) = harness.datapath.maps.services.values()
    last = harness.datapath.maps.slots[entry.cluster.base + entry.slots - 1]
    assert (last.address, last.port, set(last.flags)) == (DNS.address, 80, {"node_local"})
    assert (entry.cluster.size, entry.slots) == (1, 2)
    assert answering_in(harness.service_sync.planner.actual) == {asked}
    harness.send(answering())
    assert "node_local" not in flags(harness)
