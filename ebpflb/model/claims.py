# SPDX-License-Identifier: Apache-2.0
"""This agent's copy of what Services ask of the pools (pools.py), and of the Nodes that may answer.

Work is proportional to what changed: a claim that has what it asks for needs no further look.
"""

from collections.abc import Mapping
from typing import NamedTuple

from ebpflb.model import addresses, nodes, objects
from ebpflb.model.addresses import Address, Network
from ebpflb.model.events import Key
from ebpflb.model.pools import BALANCER, Claim, Pools, Unusable, held_by, is_pooled, read_claim

WRITER = "load balancer addresses"  # the name whose owner, by rendezvous hashing, writes them


class NodeFacts(NamedTuple):
    """``pods``: the ranges of its pods' addresses; ``balanced``: load balancers may use it."""

    ready: bool
    balanced: bool
    addresses: tuple[Address, ...]
    pods: tuple[Network, ...]


class Claims:
    """Without pools nothing is stored, or only Nodes (``keeps_nodes``).

    ``former``: Services that have addresses of the pools and may not: they ask no more, or are of
    a type that has none.
    """

    def __init__(self, pools: Pools, *, keeps_nodes: bool = False) -> None:
        self.pools, self._keeps_nodes = pools, keeps_nodes or bool(pools)
        self.stored: dict[Key, Claim] = {}
        self.former: set[Key] = set()
        self.nodes: dict[str, NodeFacts] = {}
        self.version = 0  # another one after each change
        self._holders: dict[Address, set[Key]] = {}
        self._changed: set[Key] = set()
        self._gone = False  # an address may be free that another Service waits for

    def store(self, key: Key, service: objects.Service) -> None:
        if not self.pools:
            return
        claim, before = read_claim(service), self.stored.get(key)
        if claim is not None:
            self.former.discard(key)
            if claim != before:
                self._replace(key, claim)
            return
        if before is not None:
            self._replace(key, None)
        is_former = before is not None or key in self.former or service.spec.type != BALANCER
        if is_former and any(it and is_pooled(self.pools, it) for it in held_by(service)):
            self.former.add(key)
            self._changed.add(key)
        else:
            self._forget(key)

    def drop(self, key: Key) -> None:
        """Forget a Service that was deleted."""
        self._forget(key)
        if key in self.stored:
            self._replace(key, None)

    def _forget(self, key: Key) -> None:
        if key in self.former:
            self.former.discard(key)
            self._changed.add(key)
            self._gone = True

    def store_node(self, node: objects.Node) -> None:
        if self._keeps_nodes:
            found = NodeFacts(
                nodes.is_ready(node),
                nodes.is_balanced(node),
                nodes.addresses(node),
                nodes.pod_cidrs(node),
            )
            self.version += self.nodes.get(node.metadata.name) != found
            self.nodes[node.metadata.name] = found

    def drop_node(self, name: str) -> None:
        self.version += self.nodes.pop(name, None) is not None

    def answering(self) -> frozenset[str]:
        """Return the Nodes that may answer: of those that load balancers may use the Ready ones.

        If none is Ready, all of them: then the API server hears nobody.
        """
        balanced = {name: its.ready for name, its in self.nodes.items() if its.balanced}
        return frozenset(it for it, ready in balanced.items() if ready) or frozenset(balanced)

    def is_local(self, service: Key) -> bool:
        """Whether only nodes with an endpoint serve the Service to clients outside."""
        claim = self.stored.get(service)
        return claim is not None and claim.is_local

    def take_changed(self) -> tuple[set[Key], bool]:
        """Return what has changed since the last call, and whether addresses may be free now."""
        taken = self._changed, self._gone
        self._changed, self._gone = set(), False
        return taken

    def is_settled(self, key: Key) -> bool:
        """Whether a Service has what it asks for, as far as its own status shows."""
        claim = self.stored.get(key)
        if claim is None:
            return key not in self.former
        held = {it for it in claim.held if it is not None}
        families = {addresses.family(it) for it in held}
        has_all = held >= {*claim.wanted} and families >= {*claim.families} & self._families
        is_right = len(held) == len(claim.held) == len(families) and families <= {*claim.families}
        alone = all(len(self._holders[it]) == 1 for it in held)
        pooled = all(is_pooled(self.pools, it) for it in held)
        return has_all and is_right and alone and pooled and not claim.invalid

    @property
    def _families(self) -> set[addresses.Family]:
        return {addresses.family(it.first) for pool in self.pools for it in pool.ranges}

    def _replace(self, key: Key, claim: Claim | None) -> None:
        before = self.stored.pop(key, None)
        self.version += 1
        for address in before.held if before else ():
            if address is not None:
                holders = self._holders[address]
                holders.discard(key)
                self._changed |= holders  # they may have been in conflict
                if not holders:
                    del self._holders[address]
        if before and (claim is None or {*before.held} - {*claim.held}):
            self._gone = True
        if claim is not None:
            self.stored[key] = claim
            for address in claim.held:
                if address is not None:
                    self._holders.setdefault(address, set()).add(key)
        self._changed.add(key)

    def copy(self) -> "Claims":
        """Return the claims and Nodes of this moment, for another thread to read."""
        made = Claims(self.pools)
        made.stored, made.former, made.nodes = {**self.stored}, {*self.former}, {**self.nodes}
        return made

    def unusable(
        self,
        own: Mapping[Address, str],
        services: Mapping[Address, str],
        ranges: Mapping[Network, str],
    ) -> Unusable:
        """Return what no Service may get; ``own``: addresses of this node and of routers.

        ``services``: of Services of other classes; ``ranges``: of cluster IPs.
        """
        found = dict(services)
        networks = dict(ranges)
        for node in self.nodes.values():
            found |= dict.fromkeys(node.addresses, "it is the address of a node")
            networks |= dict.fromkeys(node.pods, "it is an address of pods")
        near = {net: why for net, why in networks.items() if self._overlaps(net)}
        return Unusable(found | dict(own), near)

    def _overlaps(self, network: Network) -> bool:
        ranges = [it for pool in self.pools for it in pool.ranges]
        return any(
            it.has(network[0]) or it.has(network[-1]) or it.first in network for it in ranges
        )
