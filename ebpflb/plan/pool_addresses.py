# SPDX-License-Identifier: Apache-2.0
"""Which Service gets which address of the pools, and which node answers for it. Pure.

All decisions follow from their inputs alone, so that two nodes that decide at the same time decide
the same: addresses are given to the oldest Service first, the lowest free address first, and nodes
are ranked by rendezvous hashing (each node's hash together with the name; the highest owns it), so
that only the addresses of a node that goes move.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.events import Key
from ebpflb.model.pools import MOST_ADDRESSES, Claim, Labels, Pool, Pools, Range

POOLS = "pools"  # the name whose owner gives addresses to Services
Barred = Callable[[Address], str]
"""Why no Service may have an address, such as that it is a node's; "" if it may."""


def owner(name: str, nodes: Iterable[str]) -> str:
    """Return the node that owns a name; "" without nodes."""
    return max(nodes, key=lambda node: _rank(name, node), default="")


def _rank(name: str, node: str) -> bytes:
    return hashlib.sha256(f"{name}/{node}".encode()).digest()


class Allocation(NamedTuple):
    """``given``: the addresses of each Service; ``problems``: why it lacks one, or lost one."""

    given: dict[Key, tuple[Address, ...]]
    problems: dict[Key, str]


def allocate(
    claims: Iterable[Claim],
    pools: Pools,
    barred: Barred = lambda address: "",
    labels: Mapping[str, Labels] = {},
) -> Allocation:
    """Give each Service one address for each of its families that a pool has.

    ``labels`` are those of namespaces. A Service keeps the addresses that it has as long as it may
    have them: if two have the same, the older keeps it. Then the others get theirs, oldest first.
    """
    ordered = sorted(claims, key=lambda claim: claim.age)
    giving = _Giving(pools, barred, labels)
    kept = {claim.key: giving.keep(claim) for claim in ordered}
    return Allocation(
        {claim.key: giving.complete(claim, kept[claim.key]) for claim in ordered}, giving.problems
    )


class _Giving:
    """The addresses given so far, with the Services that have them."""

    def __init__(self, pools: Pools, barred: Barred, labels: Mapping[str, Labels]) -> None:
        self._pools, self._barred, self._labels = pools, barred, labels
        self.problems: dict[Key, str] = {}
        self._having: defaultdict[Address, list[Claim]] = defaultdict(list)
        self._shared: defaultdict[tuple[str, str], list[Address]] = defaultdict(list)
        self._free = {range: self._free_in(range) for pool in pools for range in pool.ranges}

    def keep(self, claim: Claim) -> tuple[Address, ...]:
        """Return the addresses that the Service has, and keeps."""
        kept: dict[int, Address] = {}
        for address in claim.held:
            wanted = _of_family(address.version, claim.wanted) or address
            if address.version not in claim.families or address.version in kept:
                continue
            why = self._refusal(claim, address)
            if address != wanted:
                why = f"{address} is given up for {wanted}, which the Service asks for"
            if why:
                self.problems[claim.key] = why
            else:
                kept[address.version] = address
                self._give(claim, address)
        return tuple(kept.values())

    def complete(self, claim: Claim, kept: tuple[Address, ...]) -> tuple[Address, ...]:
        """Return the Service's addresses: those kept, and new ones for the other families."""
        if claim.problem:
            self.problems[claim.key] = claim.problem
            return kept
        found = list(kept)
        for family in claim.families:
            if _of_family(family, kept):
                continue
            wanted = _of_family(family, claim.wanted)
            if wanted and (why := self._refusal(claim, wanted)):
                self.problems[claim.key] = why
            elif address := wanted or self._any(claim, family):
                found.append(address)
                self._give(claim, address)
        if not found:
            self.problems.setdefault(claim.key, self._lack(claim))
        return tuple(found)

    def _any(self, claim: Claim, family: int) -> Address | None:
        """Return an address that the Service can share, else a free one; None: there is none."""
        for address in self._shared[claim.key.namespace, claim.sharing] if claim.sharing else ():
            if address.version == family and not self._refusal(claim, address):
                return address
        if len(self._having) >= MOST_ADDRESSES:
            return None
        ranges = (it for pool in self._serving(claim) for it in pool.ranges)
        free = (next(self._free[it], None) for it in ranges if it.first.version == family)
        return next((address for address in free if address), None)

    def _free_in(self, range: Range) -> Iterator[Address]:
        """Yield the free addresses; each is free when it is asked for, and given then."""
        return (it for it in range.each() if it not in self._having and not self._barred(it))

    def _give(self, claim: Claim, address: Address) -> None:
        self._having[address].append(claim)
        if claim.sharing:
            self._shared[claim.key.namespace, claim.sharing].append(address)

    def _serving(self, claim: Claim) -> list[Pool]:
        labels = self._labels.get(claim.key.namespace, {})
        return [pool for pool in self._pools if pool.serves(labels)]

    def _refusal(self, claim: Claim, address: Address) -> str:
        """Return why the Service cannot have the address; "" if it can."""
        if not any(address in pool for pool in self._serving(claim)):
            return f"{address} is in no pool of --l2-pool for namespace {claim.key.namespace}"
        if why := self._barred(address):
            return f"{address} {why}"
        others = self._having.get(address, ())
        if not all(_can_share(claim, each) for each in others):
            return f"{address} is the address of another Service"
        if not others and len(self._having) >= MOST_ADDRESSES:
            return f"the Services have {MOST_ADDRESSES} addresses, which is the most"
        return ""

    def _lack(self, claim: Claim) -> str:
        if len(self._having) >= MOST_ADDRESSES:
            return f"the Services have {MOST_ADDRESSES} addresses, which is the most"
        if not self._serving(claim):
            return f"--l2-pool has no pool for namespace {claim.key.namespace}"
        return "the pools of --l2-pool have no free address for it"


def _of_family(family: int, listed: Iterable[Address]) -> Address | None:
    return next((each for each in listed if each.version == family), None)


def _can_share(one: Claim, other: Claim) -> bool:
    """Whether two Services may have the same address: one tenant's, which agreed, by ports.

    A node without an endpoint of a Service with policy Local drops its packets, so the policies
    must be the same.
    """
    is_agreed = one.sharing and (one.key.namespace, one.sharing) == (
        other.key.namespace,
        other.sharing,
    )
    return bool(is_agreed) and one.local == other.local and one.ports.isdisjoint(other.ports)


def announced(
    claims: Iterable[Claim], pools: Pools, barred: Barred
) -> dict[Address, tuple[Claim, ...]]:
    """Return the addresses that the cluster's nodes answer for, with the Services that have them.

    At most MOST_ADDRESSES, those of the oldest Services. Others than those of a pool, and barred
    ones, are left out.
    """
    found: dict[Address, tuple[Claim, ...]] = {}
    for claim in sorted(claims, key=lambda claim: claim.age):
        for address in claim.held:
            is_ours = any(address in pool for pool in pools) and not barred(address)
            if is_ours and (address in found or len(found) < MOST_ADDRESSES):
                found[address] = (*found.get(address, ()), claim)
    return found


def preferred(local: Iterable[Collection[str]]) -> frozenset[str]:
    """Return the nodes that should own an address, given the nodes with endpoints of its Services.

    With policy Local only such a node serves. Empty: any node may.
    """
    each = [frozenset(nodes) for nodes in local if nodes]
    return frozenset.intersection(*each) or each[0] if each else frozenset()
