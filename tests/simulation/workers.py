# SPDX-License-Identifier: Apache-2.0
"""The worker beside the agent's loop that ends sockets whose endpoint was removed.

It takes its turn when it is due, while the loop waits. Sockets are listed and ended as by
sock_diag: the clients' sockets are all in another namespace than the agent.
"""

from collections.abc import Callable, Iterator
from ipaddress import ip_address
from socket import AF_INET, AF_INET6, ntohs
from typing import Any

from ebpflb.agent.stale import StaleWorker
from ebpflb.kernel.node.sock_diag import OPENING, Connected
from ebpflb.kernel.stale import EndSocket
from tests.simulation.clients import Client, Clients
from tests.simulation.places import FRONTENDS, NUMBERS

Clock = Callable[[], float]


class OpenSockets:
    """The connected sockets of some clients, in place of a ``SockDiag``."""

    def __init__(self, clients: Clients | None, clock: Clock = float) -> None:
        self._clients, self._clock = clients, clock

    def __enter__(self) -> "OpenSockets":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connected(
        self, protocol: int, port: int = 0, *, states: int | None = None
    ) -> Iterator[Connected]:
        """Return the connected sockets; each connection is answered at once."""
        for client in self._clients.connected if self._clients and states != OPENING else ():
            found = _listed(client)
            if found.protocol == protocol and port in (0, found.remote[1]):
                yield found

    def destroy(self, one: Connected) -> bool:
        assert self._clients
        return self._clients.end(one.cookie, self._clock())


class Workers:
    """The agent's workers; ``stale`` takes its turn when it is due."""

    def __init__(self, maps: Any, clients: Clients, end_socket: EndSocket, clock: Clock) -> None:
        def each_namespace(*_: object) -> Iterator[Any]:
            yield OpenSockets(None)
            yield OpenSockets(clients, clock)

        self.stale = StaleWorker(maps, each_namespace, end_socket, clock=clock, cpu_clock=clock)
        self._clock = clock

    @property
    def due(self) -> float:
        return min(each.due for each in self.stale.searching)

    def turn(self) -> None:
        for each in self.stale.searching:
            if each.due <= self._clock():
                each.turn()


def _listed(client: Client) -> Connected:
    """Return the socket with its peer and its cookie; no other socket has the same addresses and
    ports.
    """
    address, port = client.outcome >> 16 & 0xFFFFFFFF, ntohs(client.outcome & 0xFFFF)
    last, is_v6 = address.to_bytes(4, "little"), bool(client.outcome >> 48)
    remote = ip_address(b"\xfd" + bytes(11) + last).packed if is_v6 else last.ljust(16, b"\0")
    ports = bytes(2) + port.to_bytes(2, "big")
    id = ports + bytes(16) + remote + bytes(4) + client.cookie.to_bytes(8, "little")
    family = AF_INET6 if is_v6 else AF_INET
    return Connected(NUMBERS[FRONTENDS[client.frontend][2]], family, id)
