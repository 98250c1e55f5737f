# SPDX-License-Identifier: Apache-2.0
"""Which Service gets which address, and which node owns it (docs/load-balancer-addresses.md)."""

import random
from collections import Counter
from collections.abc import Iterable
from ipaddress import ip_address
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ebpflb.model.addresses import Address, Family
from ebpflb.model.events import Key
from ebpflb.model.pools import MOST_ADDRESSES, Claim, parse_pools
from ebpflb.plan.pool_addresses import allocate, announced, owner, preferred

POOLS = parse_pools(("192.0.2.1-192.0.2.3,2001:db8::1-2001:db8::2", "192.0.2.8@team=red"))
LABELS = {"red": {"team": "red"}}
NODES_OWN = ip_address("192.0.2.2")
V4 = (Family.IPV4,)


def barred(address: Address) -> str:
    return "is an address of node one" if address == NODES_OWN else ""


def named(name: str, **fields: object) -> Claim:
    """A Service by NAMESPACE/NAME; names sort by age."""
    key = Key(*name.split("/"))
    return Claim(key, "2026-01-01T00:00:00Z", key.name, "1", V4)._replace(**fields)  # type: ignore[arg-type]


def ips(*texts: str) -> tuple[Address, ...]:
    return tuple(map(ip_address, texts))


ADDRESSES = some.sampled_from(
    ips("192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.8", "192.0.2.9", "2001:db8::1", "::9")
)


@some.composite
def claims(draw: some.DrawFn) -> list[Claim]:
    """Services of two tenants that ask for anything, and have anything."""
    found = []
    for number in range(draw(some.integers(0, 6))):
        both = [(Family.IPV4,), (Family.IPV6,), (Family.IPV4, Family.IPV6)]
        key = Key(draw(some.sampled_from(["red", "blue"])), f"s{number}")
        wanted = draw(some.lists(ADDRESSES, max_size=2, unique_by=lambda it: it.version))
        ports = draw(some.sets(some.sampled_from([("TCP", 80), ("UDP", 80)]), min_size=1))
        found.append(
            Claim(
                key,
                draw(some.sampled_from(["1", "2"])),
                f"u{number}",
                "1",
                draw(some.sampled_from(both)),
                tuple(wanted) if draw(some.booleans()) else (),
                draw(some.sampled_from(["", "share"])),
                frozenset(ports),
                draw(some.booleans()),
                tuple(draw(some.lists(ADDRESSES, max_size=2, unique=True))),
                draw(some.sampled_from(["", "", "unreadable"])),
            )
        )
    return found


def after(found: Iterable[Claim], given: dict[Key, tuple[Address, ...]]) -> list[Claim]:
    """The Services with the addresses written."""
    return [claim._replace(held=given[claim.key]) for claim in found]


@given(claims())
@settings(max_examples=400, deadline=None)
def test_what_is_given_is_right(found: list[Claim]) -> None:
    """No address that is a node's, another tenant's, or of a pool for other namespaces; what a
    Service asks for or nothing; and every lack has a reason.
    """
    result = allocate(found, POOLS, barred, LABELS)
    for claim in found:
        its = result.given[claim.key]
        assert its or result.problems[claim.key]
        assert len({it.version for it in its}) == len(its)
        for address in its:
            assert any(
                address in p and p.serves(LABELS.get(claim.key.namespace, {})) for p in POOLS
            )
            assert not barred(address) and address.version in claim.families
            same = [it for it in claim.wanted if it.version == address.version]
            assert not same or address == same[0]
    for one, other in combinations(found, 2):
        if {*result.given[one.key]} & {*result.given[other.key]}:
            assert one.sharing and (one.sharing, one.key.namespace) == (
                other.sharing,
                other.key.namespace,
            )
            assert not one.ports & other.ports and one.local == other.local


@given(claims(), some.randoms())
@settings(max_examples=300, deadline=None)
def test_two_that_decide_at_the_same_time_decide_the_same(
    found: list[Claim], chance: random.Random
) -> None:
    """Whatever the order of the list; and once it is written nothing is changed any more."""
    result = allocate(found, POOLS, barred, LABELS)
    shuffled = chance.sample(found, len(found))
    assert allocate(shuffled, POOLS, barred, LABELS) == result
    written = after(found, result.given)
    assert allocate(written, POOLS, barred, LABELS).given == result.given


@given(claims())
@settings(max_examples=200, deadline=None)
def test_what_is_rightly_held_is_kept_whatever_comes_later(found: list[Claim]) -> None:
    written = after(found, allocate(found, POOLS, barred, LABELS).given)
    newer = named("blue/zz", created="9", wanted=ips("192.0.2.1"))
    again = allocate([*written, newer], POOLS, barred, LABELS)
    assert all(again.given[claim.key] == claim.held for claim in written)


def test_of_two_that_have_one_address_the_older_keeps_it() -> None:
    """By the time of creation, then by UID."""
    held = ips("192.0.2.1")
    young, old = named("b/a", created="2", held=held), named("a/z", created="1", held=held)
    result = allocate([young, old], POOLS)
    assert result.given == {old.key: held, young.key: ips("192.0.2.2")}
    assert result.problems == {young.key: "192.0.2.1 is the address of another Service"}
    first, second = named("a/x", uid="1", held=held), named("a/y", uid="2", held=held)
    assert allocate([second, first], POOLS).given[first.key] == held


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("192.0.2.2", "192.0.2.2 is an address of node one"),
        ("192.0.2.1", "192.0.2.1 is the address of another Service"),
        ("192.0.2.8", "192.0.2.8 is in no pool of --l2-pool for namespace blue"),
        ("10.9.9.9", "10.9.9.9 is in no pool of --l2-pool for namespace blue"),
    ],
)
def test_a_tenant_does_not_get_what_is_not_his(wanted: str, why: str) -> None:
    """The node's address, another tenant's, another pool's. He gets no other in its place."""
    owner = named("red/a", created="1", held=ips("192.0.2.1"), sharing="same")
    thief = named("blue/b", created="2", wanted=ips(wanted), sharing="same")
    result = allocate([owner, thief], POOLS, barred, LABELS)
    assert (result.given[thief.key], result.problems[thief.key]) == ((), why)
    assert result.given[owner.key] == owner.held


def test_services_share_by_port() -> None:
    dns = {"sharing": "dns", "wanted": ()}
    tcp = named("red/tcp", ports=frozenset({("TCP", 53)}), **dns)
    udp = named("red/udp", ports=frozenset({("UDP", 53)}), **dns)
    more = named("red/web", ports=frozenset({("TCP", 53), ("TCP", 80)}), **dns)
    result = allocate([tcp, udp, more], POOLS, barred, LABELS)
    assert result.given[tcp.key] == result.given[udp.key] != result.given[more.key]


def test_a_pool_that_runs_out_names_who_gets_nothing() -> None:
    found = [named(f"blue/s{number}") for number in range(4)]
    result = allocate(found, POOLS, barred, LABELS)
    assert [len(result.given[claim.key]) for claim in found] == [1, 1, 0, 0]
    assert "no free address" in result.problems[found[3].key]


def test_the_number_of_addresses_has_a_bound() -> None:
    """A pool may be an IPv6 network with more addresses than can be counted."""
    (pool,) = parse_pools(("2001:db8::/64",))
    found = [
        named(f"a/s{number:05}", families=(Family.IPV6,)) for number in range(MOST_ADDRESSES + 5)
    ]
    result = allocate(found, (pool,))
    assert sum(map(bool, result.given.values())) == MOST_ADDRESSES
    assert str(MOST_ADDRESSES) in result.problems[found[-1].key]
    many = after(found, result.given)
    assert len(announced([*many, *found], (pool,), barred)) == MOST_ADDRESSES


def test_what_is_announced_is_checked_again() -> None:
    """Others may have written the status."""
    wrong = named("blue/x", held=ips("192.0.2.2", "10.0.0.1"))
    right = named("blue/y", held=ips("192.0.2.1"))
    assert announced([wrong, right], POOLS, barred) == {right.held[0]: (right,)}


@given(some.sets(some.text("abc", min_size=1), min_size=2), some.text())
def test_only_what_a_node_owned_moves_when_it_goes(nodes: set[str], name: str) -> None:
    before = owner(name, nodes)
    for gone in nodes:
        now = owner(name, nodes - {gone})
        assert now == before if gone != before else now in nodes - {gone}


def test_each_node_owns_its_share() -> None:
    nodes = [f"node-{number}" for number in range(5)]
    counts = Counter(owner(f"192.0.2.{number}", nodes) for number in range(250))
    assert counts.keys() == {*nodes} and min(counts.values()) > 25


def test_nodes_with_endpoints_of_all_services_are_preferred() -> None:
    assert preferred([{"a", "b"}, {"b", "c"}]) == {"b"}
    assert preferred([{"a"}, {"c"}]) == {"a"}
    assert preferred([set(), {"c"}]) == {"c"}
    assert preferred([(), ()]) == set()
