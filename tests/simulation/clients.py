# SPDX-License-Identifier: Apache-2.0
"""Clients' sockets at all frontends, by natively compiled hooks: their backends are checked.

Between any two writes of the agent new connections use the frontends. Their results must be right
according to one of the views that the agent may have in force. Earlier results are kept if the
rules say so: session affinity, the frontend that a connection's socket shows, the backend of a
socket that sends datagrams.
"""

from socket import htons
from typing import Any, NamedTuple

from tests.simulation.affinity import Affinity
from tests.simulation.build import Library
from tests.simulation.endings import Endings
from tests.simulation.expected import Expected, Views, Wrong
from tests.simulation.kernel import SimMap
from tests.simulation.oracle import View
from tests.simulation.packets import Packets
from tests.simulation.places import (
    AT_LOOPBACK,
    BY_PODS_ALONE,
    FRONTENDS,
    HOST_NETNS,
    HOST_SOCKET,
    NUMBERS,
    OTHER_NETNS,
    POD_NETNS,
    POD_SOCKET,
    Asking,
    Where,
    number_of,
    spelled,
    version_of,
)

CONNECT, SENDMSG, RECVMSG, GETPEERNAME, RELEASE = range(5)
IPV4, IPV6, MAPPED = range(3)
ESTABLISHED, CLOSED = 1, 7
STREAM, DATAGRAM = 1, 2
PARTS = 6  # of the frontends one part is asked at a time, after each change the next one


class Probe(NamedTuple):
    """A new connection: its frontend, and its socket."""

    where: Where
    netns: int
    client: Asking


PROBES = [
    *(Probe(where, POD_NETNS, POD_SOCKET) for where in FRONTENDS),
    *(Probe(at, HOST_NETNS, HOST_SOCKET) for at in FRONTENDS if at not in BY_PODS_ALONE),
    *(Probe(at, HOST_NETNS, HOST_SOCKET) for at in AT_LOOPBACK),
]


class Client(NamedTuple):
    """An open socket; ``outcome`` is where its connection, or its last datagram, went."""

    frontend: int
    cookie: int
    outcome: int


class Clients:
    """``expect`` sets the allowed results; the other methods connect, and raise Wrong."""

    def __init__(self, library: Library) -> None:
        self.ffi, self.lib = library.ffi, library.lib
        self.probes = self.ffi.new("struct socket_call[]", len(PROBES))
        self.outcomes = self.ffi.new("long long[]", len(PROBES))
        for index, (where, netns, _) in enumerate(PROBES):
            self._fill(self.probes[index], CONNECT, where, netns, 0)
        self.one = self.ffi.new("struct socket_call *")
        self.names: list[Any] = []
        self.cookies, self.turn = 1 << 32, 0
        self.streams: list[Client] = []
        self.datagrams: list[Client] = []
        self.peers: list[Client] = []  # sockets of datagrams that are connected
        self.lost: list[Client] = []  # open, and not judged any more
        self.affinity = Affinity()
        self.endings = Endings()
        self.packets = Packets(library, self.affinity)
        self.expect([{}])

    def use(self, maps: dict[str, SimMap]) -> None:
        """Let the running programs use these maps."""
        self.names = [self.ffi.new("char[]", name.encode()) for name in maps]
        for index, (name, opened) in enumerate(zip(self.names, maps.values(), strict=True)):
            self.lib.bind_map(index, name, opened.place)

    def forget(self) -> None:
        """Forget earlier results: their maps are lost."""
        self.lost += self._open
        self.streams, self.datagrams, self.peers = [], [], []
        self.affinity.forget()
        self.packets.forget()

    def release(self) -> None:
        """Close all open sockets."""
        for client in (*self.lost, *self._open):
            self._fill(self.one, RELEASE, FRONTENDS[client.frontend], OTHER_NETNS[0], client.cookie)
            self.lib.run(self.one)
        self.streams, self.datagrams, self.peers = [], [], []

    @property
    def _open(self) -> list[Client]:
        return [*self.streams, *self.datagrams, *self.peers]

    @property
    def connected(self) -> list[Client]:
        """Return the sockets that the kernel lists as connected."""
        return [*self.streams, *self.peers]

    def end(self, cookie: int, now: float) -> bool:
        """Let the agent end a socket, which stays open for its owner; return False if there is
        none.
        """
        client = next((each for each in self.connected if each.cookie == cookie), None)
        if client is None:
            return False
        self.endings.judge(cookie, FRONTENDS[client.frontend], client.outcome, now)
        for judged in (self.streams, self.peers):
            judged[:] = [each for each in judged if each is not client]
        self.lost.append(client)
        return True

    def expect(self, views: list[View]) -> None:
        """Expect that one of these views is in force for each frontend."""
        found = Views(views)
        self.expected = [found.at(where, client) for where, _, client in PROBES]
        self.packets.expect(found)
        self.endings.expect(found)
        self.affinity.expect([*self.expected, *self.packets.all_expected])

    def ask_all(self, now: float) -> None:
        """Connect to the next part of the frontends, and check all open sockets."""
        count, self.turn = len(PROBES), self.turn + 1
        self.cookies += count
        part = self.turn % PARTS, PARTS
        self.lib.run_all(self.probes, count, *part, self.cookies, self.outcomes)
        outcomes = self.ffi.unpack(self.outcomes, count)
        for index in range(self.turn % PARTS, count, PARTS):
            self._judge(PROBES[index], self.expected[index], outcomes[index])
        for client in self.connected:
            self._ask_name(client)
        self.datagrams = [self._send(client) for client in self.datagrams]
        self.packets.ask(self.turn, now)

    def ask_one(self, number: int, now: float) -> None:
        """Open a connection or flow, by a client that may be interrupted."""
        if number % 3 == 0:
            self.packets.ask_one(number // 3, now)
            return
        index, netns = number * 5 % len(PROBES), OTHER_NETNS[number % len(OTHER_NETNS)]
        probe = PROBES[index]
        if probe.client is POD_SOCKET:
            probe = probe._replace(netns=netns)
        self._fill(self.one, CONNECT, probe.where, probe.netns, 0)
        if self.one.family == IPV4 and number % 2:
            self.one.family = MAPPED
        self.cookies += 1
        self.lib.run_all(self.one, 1, 0, 1, self.cookies, self.outcomes)
        self._judge(probe, self.expected[index], self.outcomes[0])

    def open(self, which: int) -> None:
        """Open a socket that stays open, to one of the frontends with backends."""
        expected = self.expected[: len(FRONTENDS)]
        leading = [n for n, each in enumerate(expected) if max(each.allowed) >= 0]
        if not leading:
            return
        index = leading[which % len(leading)]
        self.cookies += 1
        stream = FRONTENDS[index][2] == "TCP"
        how = CONNECT if stream or which % 2 else SENDMSG
        self._fill(self.one, how, FRONTENDS[index], OTHER_NETNS[0], self.cookies)
        self.lib.run(self.one)
        outcome = self.lib.outcome_of(self.one)
        probe = PROBES[index]._replace(netns=OTHER_NETNS[0])
        self._judge(probe, self.expected[index], outcome)
        if outcome >= 0:
            client = Client(index, self.cookies, outcome)
            connected = self.streams if stream else self.peers
            (connected if how == CONNECT else self.datagrams).append(client)

    def _fill(self, attempt: Any, hook: int, where: Where, netns: int, cookie: int) -> None:
        address, port, protocol = where
        attempt.hook, attempt.type = hook, STREAM if protocol == "TCP" else DATAGRAM
        attempt.protocol, attempt.state = NUMBERS[protocol], CLOSED
        attempt.netns, attempt.cookie = netns, cookie
        attempt.family = IPV6 if version_of(address) == 6 else IPV4
        attempt.address, attempt.port = number_of(address), htons(port)

    def _judge(self, probe: Probe, expected: Expected, outcome: int) -> None:
        if outcome not in expected.allowed:
            who = f"netns {probe.netns}: {probe.where}"
            raise Wrong(f"{who}: {spelled(outcome)}, not {expected}")
        if expected.services:
            self.affinity.judge(probe.netns, probe.where, expected, outcome)

    def note(self, now: float) -> None:
        """Note what the agent knows about endpoints. Call this after each of its turns."""
        for client in self.connected:
            self.endings.note(client.cookie, FRONTENDS[client.frontend], client.outcome, now)

    def judge_open(self) -> None:
        """Check open sockets after a quiet time, when the agent has ended all that it had to
        end.
        """
        for client in self.connected:
            self.endings.judge_open(client.cookie, FRONTENDS[client.frontend], client.outcome)

    def _ask_name(self, client: Client) -> None:
        """Check that getpeername of an open connection shows its frontend, whatever happened."""
        where = FRONTENDS[client.frontend]
        self._fill(self.one, GETPEERNAME, where, OTHER_NETNS[0], client.cookie)
        asked = self.one.address, self.one.port
        self.one.state = ESTABLISHED
        self.one.address = client.outcome >> 16 & 0xFFFFFFFF
        self.one.port = client.outcome & 0xFFFF
        self.lib.run(self.one)
        if (self.one.address, self.one.port) != asked or self.one.strange:
            raise Wrong(f"a connection to {where} has lost its frontend")

    def _send(self, client: Client) -> Client:
        """Check that a socket keeps the backend of its datagrams as long as the backend serves."""
        where, expected = FRONTENDS[client.frontend], self.expected[client.frontend]
        self._fill(self.one, SENDMSG, where, OTHER_NETNS[0], client.cookie)
        self.lib.run(self.one)
        outcome = self.lib.outcome_of(self.one)
        if client.outcome in expected.kept and outcome != client.outcome:
            raise Wrong(
                f"a socket that sends to {where} has lost its backend: "
                f"{spelled(outcome)}, not {spelled(client.outcome)}"
            )
        if outcome != client.outcome:
            self._judge(PROBES[client.frontend]._replace(netns=OTHER_NETNS[0]), expected, outcome)
        else:
            expected.judge_kept(f"a socket that sends to {where}", outcome)
        return client._replace(outcome=outcome)
