# SPDX-License-Identifier: Apache-2.0
"""Walks the chains of a ruleset and compares each rule with the requests that services get.

A rule is judged by itself, by what the rules ask that jump to its chain, and by the rules before it
that certainly end the chain (``earlier``). kube-proxy's own chains and our own tables are left out.
The work is bounded.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import product
from typing import NamedTuple

from ebpflb.diagnose.firewall.earlier import Earlier, may_drop_after
from ebpflb.diagnose.firewall.matches import AnyMatch, AnyOf, MarkMatch, Match, Unknown, fields
from ebpflb.diagnose.firewall.rules import Chain, Does, FirewallRule, FirewallTable
from ebpflb.diagnose.firewall.service_traffic import (
    ADDRESS_FIELDS,
    PORT_FIELDS,
    FrontendKind,
    NodeState,
    Traffic,
    TrafficFrontend,
    at_node,
)
from ebpflb.diagnose.firewall.views import Place, Views, place, views
from ebpflb.model import kube_proxy

DEEPEST = 16  # the kernel's NFT_JUMP_STACK_SIZE
MOST_STEPS = 3_000_000  # rules and comparisons: some ten seconds


class Why(Enum):
    LOST = "does not match"
    DROPPED = "matches now"
    ACCEPTED = "lets pass now, before a rule or policy that may drop them,"
    REDIRECTED = "gets the endpoint as the original destination of"


class Finding(NamedTuple):
    """A rule, and the first frontend found whose requests it handles otherwise than before.

    ``failing`` are those of its matches that make the difference.
    """

    why: Why
    table: FirewallTable
    chain: str
    rule: FirewallRule
    place: Place
    frontend: TrafficFrontend | None = None
    failing: tuple[AnyMatch, ...] = ()


class _Path(NamedTuple):
    """The way to a chain: what the jumps ask; ``accepted``: it has left translated packets out."""

    matches: tuple[AnyMatch, ...] = ()
    accepted: bool = False
    depth: int = 0
    earlier: Earlier = Earlier()


@dataclass
class RuleSearch:
    """``findings`` in the order of the rules; ``skipped``: rules that cannot be read in full;
    ``unjudged``: chains with rules at hooks that are not compared; ``steps`` are left of those
    allowed.
    """

    traffic: Traffic
    node: NodeState
    in_pod: bool = False
    steps: int = MOST_STEPS
    skipped: int = 0
    unjudged: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    _seen: set[object] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return self.steps > 0

    def add(self, tables: Iterable[FirewallTable]) -> None:
        """Searches these tables."""
        for table in tables:
            for chain in table.chains.values():
                if chain.rules and (table.of_bridges or chain.hook == "egress"):
                    self.unjudged.append(f"{table.title}, chain {chain.name}")
                    continue
                where = place(chain, in_pod=self.in_pod)
                if where:
                    self._walk(table, chain, where, _Path())

    def _walk(self, table: FirewallTable, chain: Chain, at: Place, path: _Path) -> None:
        if not self._is_new((table.title, chain.name, at, path)) or path.depth > DEEPEST:
            return
        last = may_drop_after(chain.rules, chain)
        for at_rule, rule in enumerate(chain.rules):
            self.steps -= 1
            if not self.complete:
                return
            matches = path.matches + rule.matches
            after = path.earlier._replace(drops_after=path.earlier.drops_after or at_rule < last)
            if any(isinstance(match, Unknown) for match in matches):
                self.skipped += 1
            elif rule.jump:
                there = table.chains.get(rule.jump)
                if there and not kube_proxy.is_chain(rule.jump):
                    down = _Path(matches, path.accepted, path.depth + 1, after)
                    self._walk(table, there, at, down)
            else:
                found = Finding(Why.LOST, table, chain.name, rule, at)
                self._judge(found, path._replace(earlier=after), matches)
                path = path._replace(
                    accepted=path.accepted or _accepts_marked(rule, self.node),
                    earlier=path.earlier.and_rule(rule),
                )

    def _is_new(self, key: object) -> bool:
        known = key in self._seen
        self._seen.add(key)
        return not known

    def _judge(self, rule: Finding, path: _Path, matches: tuple[AnyMatch, ...]) -> None:
        """Adds the rule if it handles requests of any frontend otherwise than before."""
        for frontend, seen in self._views(rule, matches):
            found = _difference(rule._replace(frontend=frontend), path.earlier, matches, seen)
            if found and not (found[0] is Why.DROPPED and path.accepted):
                if self._is_new((rule.table.title, rule.chain, rule.rule.where, rule.place.hook)):
                    self.findings.append(
                        rule._replace(why=found[0], failing=found[1], frontend=frontend)
                    )
                return

    def _views(
        self, it: Finding, matches: tuple[AnyMatch, ...]
    ) -> Iterator[tuple[TrafficFrontend, Views]]:
        """What the rule may see, of those frontends that it may be about."""
        asked = _Asked.by(it, matches)
        if asked.nothing:
            return
        for frontend in self.traffic.named(matches):
            if it.table.family not in (0, frontend.family) or not asked.concerns(
                frontend, self.node
            ):
                continue
            for reached, endpoint in product(at_node(self.node, frontend), frontend.endpoints):
                self.steps -= 1
                if not self.complete:
                    return
                seen = views(it.place, self.node, frontend, reached, endpoint)
                if seen:
                    named = asked.address or asked.port
                    yield frontend, seen if named else seen._replace(intended=seen.before)


class _Asked(NamedTuple):
    """What a rule says about destinations: whether it names addresses, ports."""

    place: Place
    address: bool
    port: bool
    nothing: bool  # nothing that ebpflb could make a difference to
    everything: bool  # it is about all requests that it sees

    @classmethod
    def by(cls, it: Finding, matches: tuple[AnyMatch, ...]) -> "_Asked":
        address, port = _names(matches, ADDRESS_FIELDS), _names(matches, PORT_FIELDS)
        everything = it.place.in_pod and it.rule.does is Does.NAT
        asked = frozenset[str]().union(*map(fields, matches))
        differing = _EARLY if it.place.early else _LATE
        nothing = not (everything or address or port or asked & differing)
        return cls(it.place, address, port, nothing, everything)

    def concerns(self, frontend: TrafficFrontend, node: NodeState) -> bool:
        """A rule for a port alone is about NodePorts and, before NAT, about external addresses;
        one for neither port nor address is about what comes from outside.
        """
        if self.everything or self.address:
            return True
        outside = frontend.kind is not FrontendKind.CLUSTER_IP and not self.place.of_sockets
        if self.port:
            return frontend.kind is FrontendKind.NODEPORT or (outside and self.place.early)
        return outside


_EARLY = {*ADDRESS_FIELDS, *PORT_FIELDS, "local"}
_LATE = {"original_address", "original_port", "dnat", "mark"}


def _difference(
    it: Finding, earlier: Earlier, matches: tuple[AnyMatch, ...], seen: Views
) -> tuple[Why, tuple[AnyMatch, ...]] | None:
    """What becomes of the rule for one request, and which of its matches makes the difference."""
    now, before, intended = (
        all(match.holds(view) for match in matches)
        for view in (seen.now, seen.before, seen.intended)
    )
    comes, came, would = (earlier.leaves(view) for view in (seen.now, seen.before, seen.intended))
    if not (comes or came or would):
        return None
    now = now and comes
    if it.place.in_pod and it.rule.does is Does.NAT and before:
        return Why.REDIRECTED, ()
    of_pods = it.frontend is not None and it.frontend.kind is FrontendKind.CLUSTER_IP
    lost = intended if of_pods and not it.place.of_sockets else before or intended
    if lost and not now:
        failing = tuple(match for match in matches if not match.holds(seen.now))
        return (Why.LOST, failing) if any(not match.negated for match in failing) else None
    if now and not ((before and came) or (intended and would)):
        new = tuple(match for match in matches if not match.holds(seen.before))
        if it.rule.does is Does.DROP:
            return Why.DROPPED, new
        if it.rule.ends and it.rule.does is Does.ACCEPT and earlier.drops_after and new:
            return Why.ACCEPTED, new
    return None


def _accepts_marked(rule: FirewallRule, node: NodeState) -> bool:
    """Whether it lets everything pass that has --packet-mark."""
    return (
        rule.does is Does.ACCEPT
        and bool(rule.matches)
        and all(
            isinstance(match, MarkMatch)
            and not match.mask & ~node.mark.mask
            and ((match.mark ^ node.mark.mark) & match.mask == 0) != match.negated
            for match in rule.matches
        )
    )


def _names(matches: Iterable[AnyMatch], of: frozenset[str]) -> bool:
    """Whether they say what one of these fields is (and not only what it is not)."""
    return any(
        isinstance(match, Match | AnyOf) and not match.negated and bool(of & fields(match))
        for match in matches
    )
