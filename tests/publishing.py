# SPDX-License-Identifier: Apache-2.0
"""Services in maps that a test fills, as the planner would lay them out.

Tests write everything as text: a frontend is "172.30.0.1:80/udp" (a NodePort "0.0.0.0:30080"), a
backend "10.1.0.1:8080", flags are words.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address, ip_address
from typing import Any

from ebpflb.entries.services import FIRST_BACKENDS, NO_TABLE, Backend, Frontend, Range, ServiceEntry
from ebpflb.model.addresses import Address

PROTOCOLS = {"icmp": 1, "tcp": 6, "udp": 17, "sctp": 132}
_NOBODY = Backend(IPv6Address(0), 0, frozenset(), 0, 0)


def place(text: str) -> tuple[Address, int]:
    """Return the address and port of "10.1.0.1:8080" or "[fd00::1]:8080"."""
    host, _, port = text.rpartition(":")
    return ip_address(host.strip("[]")), int(port)


def frontend(text: str) -> Frontend:
    where, _, protocol = text.partition("/")
    return Frontend(*place(where), PROTOCOLS[protocol or "tcp"])


class Publisher(ABC):
    """Fills the maps; a subclass defines ``put``, which writes one entry."""

    def __init__(self) -> None:
        self.ids: dict[tuple[int, str], int] = {}
        self.blocks: dict[int, Range] = {}
        self.next_slot = 0

    @abstractmethod
    def put(self, name: str, key: Any, value: Any) -> None:
        """Write an entry into the map of this name."""

    def owns(self, *addresses: str) -> None:
        """Add addresses of this node that serve NodePorts."""
        for address in addresses:
            self.put("node_addresses", ip_address(address), 1)

    def has(self, *addresses: str) -> None:
        """Add addresses of this node, whether they serve NodePorts or not."""
        for address in addresses:
            self.put("own_addresses", ip_address(address), 1)

    def publish(
        self,
        service: int,
        frontends: Mapping[str, str] | Sequence[str],
        *,
        cluster: Sequence[str] = (),
        local: Sequence[str] = (),
        leaving: Sequence[str] = (),
        here: Sequence[str] = (),
        affinity: int = 0,
    ) -> None:
        """Write a service or its change: a new block, then its frontends, then the removal of the
        old block.

        ``leaving`` backends are in no list and serve their existing flows; ``here`` are the
        backends on this node.
        """
        both = [b for b in cluster if b in local]
        order = [b for b in cluster if b not in local] + both
        order += [b for b in local if b not in cluster] + list(leaving)
        lists = {"cluster": cluster, "local": local, "here": here}
        block = self._fill_block(service, order, lists)
        first = tuple(self.backend_id(service, each) for each in order[:FIRST_BACKENDS])
        in_cluster = Range(block.base, len(cluster))
        in_local = Range(block.base + len(cluster) - len(both), len(local))
        some = {"endpoints"} if cluster or local else set()
        words = frontends if isinstance(frontends, Mapping) else dict.fromkeys(frontends, "")
        for text, kinds in words.items():
            where = frontend(text)
            nodeport = {"nodeport"} if where.address.is_unspecified else set[str]()
            flags = frozenset(kinds.split()) | some | nodeport
            rest = affinity, block.size, in_cluster, in_local, NO_TABLE, first
            self._lead(where, ServiceEntry(service, flags, *rest))
        self._clear(self.blocks.get(service, Range(0, 0)))
        self.blocks[service] = block

    def backend_id(self, service: int, text: str) -> int:
        """Return the backend's id, which stays the same during the test."""
        return self.ids.setdefault((service, text), len(self.ids) + 1)

    def _fill_block(
        self, service: int, order: Sequence[str], lists: Mapping[str, Sequence[str]]
    ) -> Range:
        block = Range(self.next_slot, len(order))
        self.next_slot += block.size
        for slot, text in enumerate(order, block.base):
            flags = frozenset(word for word, listed in lists.items() if text in listed)
            number = self.backend_id(service, text)
            self.put("slots", slot, Backend(*place(text), flags, number, service))
            self.put("backend_slots", number, slot)
        return block

    def _lead(self, where: Frontend, service: ServiceEntry) -> None:
        self.put("services", where, service)
        if "external" not in service.flags:
            self.put("cluster_ips", where.address, 1)

    def _clear(self, block: Range) -> None:
        for slot in range(block.base, block.base + block.size):
            self.put("slots", slot, _NOBODY)
