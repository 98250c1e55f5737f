# SPDX-License-Identifier: Apache-2.0
"""UDP flows translated by conntrack: the table, as ``netfilter.conntrack`` shows it.

An entry keeps its backend while it exists. The agent deletes the entries whose backend is gone, and
no others.
"""

from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_address
from socket import ntohs

from ebpflb.entries.flows import Connection, Ends
from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter.conntrack import MayBe, Wanted
from ebpflb.model.addresses import Address
from ebpflb.model.services import Protocol
from ebpflb.plan.stale import Endpoint
from tests.simulation.endings import Endings
from tests.simulation.expected import Expected
from tests.simulation.places import FRONTENDS, Where, of_family, packed, version_of

CLIENT, FIRST_PORT = "198.18.0.77", 20_000
DATAGRAMS = [index for index, where in enumerate(FRONTENDS) if where[2] == "UDP"]


class TrackedFlows:
    """The flows of conntrack: ``entries``, each with its frontend, and its backend as an
    outcome.
    """

    def __init__(self, endings: Endings, clock: Callable[[], float]) -> None:
        self._endings, self._clock = endings, clock
        self.entries: dict[Connection, tuple[Where, int]] = {}
        self.failures = 0  # how many requests are to fail
        self._port = FIRST_PORT

    def open(self, which: int, expected: list[Expected]) -> None:
        """Open a flow to a backend; if the service has no endpoints at all, to the frontend
        itself.
        """
        leading = [index for index in DATAGRAMS if max(expected[index].allowed) >= 0]
        places = leading if leading and which % 8 else DATAGRAMS
        index = places[which % len(places)]
        where = FRONTENDS[index]
        backends = sorted(each for each in expected[index].allowed if each >= 0)
        if not backends and any(each and each.serving for each in self._endings.views.found(where)):
            return  # they get no new flows, and are no reason to search
        outcome = backends[which % len(backends)] if backends else packed(where[:2])
        self._port += 1
        entry = _connection(where, outcome, self._port)
        self.entries[entry] = where, outcome
        self._endings.note(entry, where, outcome, self._clock())

    def note(self) -> None:
        for entry, (where, outcome) in self.entries.items():
            self._endings.note(entry, where, outcome, self._clock())

    def judge_open(self) -> None:
        for entry, (where, outcome) in self.entries.items():
            self._endings.judge_open(entry, where, outcome)

    def forget(self) -> None:
        self.entries.clear()

    # As netfilter.conntrack

    def count(self) -> int:
        self._may_fail()
        return len(self.entries)

    def connections(
        self,
        wanted: Wanted,
        protocol: Protocol,
        *,
        without: int = 0,
        may_be: MayBe,
        endpoint: Endpoint | None = None,
    ) -> Iterator[Connection]:
        self._may_fail()
        for entry in [*self.entries]:
            to, by = entry.original, entry.reply
            if entry.protocol != protocol or entry.status & without:
                continue
            if endpoint not in (None, (by.source, by.source_port)):
                continue
            ends = to.destination.packed, to.destination_port, by.source.packed, by.source_port
            if wanted(protocol, *ends[:2]) and may_be(protocol, *ends):
                yield entry

    def delete(self, entries: Iterable[Connection]) -> int:
        found = [entry for entry in entries if entry in self.entries]
        if found:
            self._may_fail()
        for entry in found:
            self._endings.judge(entry, *self.entries.pop(entry), self._clock())
        return len(found)

    def _may_fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise NodeError("conntrack: scripted")


def _connection(where: Where, outcome: int, port: int) -> Connection:
    client = ip_address(of_family(CLIENT, version_of(where[0])))
    original = Ends(client, ip_address(where[0]), port, where[1])
    reply = Ends(_address(outcome), client, ntohs(outcome & 0xFFFF), port)
    return Connection(Protocol.UDP, original, reply)


def _address(outcome: int) -> Address:
    last = (outcome >> 16 & 0xFFFFFFFF).to_bytes(4, "little")
    return ip_address(b"\xfd" + bytes(11) + last if outcome >> 48 else last)
