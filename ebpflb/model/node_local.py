# SPDX-License-Identifier: Apache-2.0
"""Listeners on this node that serve sockets instead of a Service's endpoints, while they answer.

A Service names the address by its annotation (annotations.py); the port is the Service's own.
"""

from collections.abc import Iterable
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.events import Key
from ebpflb.model.services import Protocol, ServicePort

STATES = (ANSWERING, SILENT) = ("answering", "silent")
MOST = 64  # listeners that are asked whether they answer: those of the oldest Services


class Listener(NamedTuple):
    """An address, port and protocol."""

    address: Address
    port: int
    protocol: Protocol


class Answering(NamedTuple):
    """A message to the agent's loop: the listeners that answer now."""

    listeners: frozenset[Listener]


def listener(port: ServicePort) -> Listener | None:
    """Return the listener that a service port names."""
    if port.node_local is None:
        return None
    return Listener(port.node_local, port.port, port.name.protocol)


class NodeLocalPorts:
    """The Services that name listeners, and ``answering``, those that answer.

    ``changed``: since the last call of ``take_wanted``.
    """

    def __init__(self) -> None:
        self._ports: dict[Key, tuple[ServicePort, ...]] = {}
        self.answering: frozenset[Listener] = frozenset()
        self.changed = True

    def name(self, key: Key, ports: Iterable[ServicePort]) -> None:
        """Note the service ports of a Service; it has none if it was deleted."""
        named = tuple(port for port in ports if port.node_local)
        self.changed |= bool(self._ports.pop(key, ()) or named)
        if named:
            self._ports[key] = named

    def set_answering(self, answering: frozenset[Listener]) -> set[Key]:
        """Set which listeners answer; return the Services of those that have changed."""
        changed, self.answering = self.answering ^ answering, answering
        return {key for key, ports in self._ports.items() if changed & set(map(listener, ports))}

    def serving(self, port: ServicePort) -> Address | None:
        """Return the address of the listener that serves a port's sockets, if it answers."""
        return port.node_local if listener(port) in self.answering else None

    def take_wanted(self) -> frozenset[Listener]:
        """Return the listeners that are asked: at most MOST, those of the oldest Services."""
        self.changed = False
        ports = sorted(
            (port for ports in self._ports.values() for port in ports),
            key=lambda port: (port.created, port.name),
        )
        found = dict.fromkeys(filter(None, map(listener, ports)))
        return frozenset(list(found)[:MOST])
