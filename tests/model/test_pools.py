# SPDX-License-Identifier: Apache-2.0
"""Which Service gets which address of the pools (docs/load-balancer-addresses.md)."""

from ipaddress import ip_address, ip_network
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpflb.lab import manifests
from ebpflb.model import objects
from ebpflb.model.addresses import Address, Family
from ebpflb.model.claims import Claims
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Changed, Key, Kind, ReadObject
from ebpflb.model.nodes import EXCLUDED_LABEL
from ebpflb.model.pools import (
    AGENT,
    CLASS,
    MOST_ANSWERED,
    PROGRAM,
    Allotted,
    Claim,
    Pools,
    Unusable,
    allot,
    announced,
    is_probed,
    parse_pools,
    preferred,
    probed_address,
    ranked,
    read_claim,
    show_pools,
)
from ebpflb.model.services import Admission, parse
from tests.model import builders

POOL = parse_pools(["192.0.2.200-192.0.2.203,2001:db8::-2001:db8::3"])
BOTH = ["IPv4", "IPv6"]
OTHERS = "a Service of another namespace has it"


def balanced(name: str, *held: str, created: int = 0, **fields: Any) -> Claim:
    """Return the claim of a Service; ``wanted`` and ``sharing`` are its annotations."""
    annotations = {
        **builders.annotated("ebpflb.io/load-balancer-ips", fields.pop("wanted", None)),
        **builders.annotated("ebpflb.io/allow-shared-ip", fields.pop("sharing", None)),
    }
    made = builders.service(
        name=name,
        namespace=fields.pop("namespace", "shop"),
        annotations=annotations,
        ingress=[{"ip": it} for it in held],
        **{"type": "LoadBalancer", "loadBalancerClass": CLASS, "ipFamilies": ["IPv4"], **fields},
    )
    claim = read_claim(made, uid=name)
    assert claim is not None
    return claim._replace(created=f"2026-11-{created:02}")


def allotted(
    *claims: Claim,
    pools: Pools = POOL,
    unusable: Unusable = Unusable(),  # noqa: B008
    **labels: dict[str, str],
) -> dict[str, Allotted]:
    found = allot(claims, pools, unusable, lambda namespace: labels.get(namespace, {}))
    return {it.claim.key.name: it for it in found}


def ips(*claims: Claim, **how: Any) -> dict[str, str]:
    found = allotted(*claims, **how)
    return {name: " ".join(map(str, it.addresses)) for name, it in found.items()}


def problem(name: str, *claims: Claim, **how: Any) -> str:
    return allotted(*claims, **how)[name].problem


def test_each_gets_the_first_free_address_of_its_families() -> None:
    """The older Service gets the lower address; one with both families gets one of each."""
    claims = balanced("b", created=1), balanced("a", created=2, ipFamilies=BOTH)
    assert ips(*claims) == {"b": "192.0.2.200", "a": "192.0.2.201 2001:db8::"}


def test_what_is_held_is_kept() -> None:
    """A Service keeps its address, also if an older one without an address comes."""
    assert ips(balanced("new", created=1), balanced("old", "192.0.2.200", created=2)) == {
        "new": "192.0.2.201",
        "old": "192.0.2.200",
    }


def test_of_two_that_hold_one_address_the_older_keeps_it() -> None:
    """The younger one gets another; at the same second the UID decides."""
    same = balanced("b", "192.0.2.201", created=2), balanced("a", "192.0.2.201", created=1)
    assert ips(*same) == {"a": "192.0.2.201", "b": "192.0.2.200"}
    assert problem("b", *same) == "192.0.2.201 is taken away: Service shop/a has it"
    assert ips(balanced("b", "192.0.2.201"), balanced("a", "192.0.2.201"))["a"] == "192.0.2.201"


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ("192.0.2.201", "Service shop/other has it"),
        ("192.0.2.202", "it is the address of a node"),
        ("192.0.2.203", "it is an address of pods"),
        ("192.0.2.204", "it is in no pool"),
        ("10.96.0.1", "it is in no pool"),
    ],
)
def test_no_other_address_by_asking_for_it(wanted: str, why: str) -> None:
    """Another Service's, a node's, a pod's, or an address outside of the pools is not given, and
    nothing instead.
    """
    unusable = Unusable(
        {ip_address("192.0.2.202"): "it is the address of a node"},
        {ip_network("192.0.2.203/32"): "it is an address of pods"},
    )
    claims = balanced("web", wanted=wanted), balanced("other", "192.0.2.201", created=2)
    assert ips(*claims, unusable=unusable)["web"] == ""
    assert problem("web", *claims, unusable=unusable) == f"{wanted} is not given to it: {why}"


@pytest.mark.parametrize("name", objects.REQUESTED)
def test_the_annotations_of_others_mean_the_same(name: str) -> None:
    """Services from MetalLB or kube-vip need no other annotations; ours takes precedence."""
    found = claim_with({name: "192.0.2.203", objects.SHARING[-1]: "one"})
    assert (found.wanted, found.sharing) == ((ip_address("192.0.2.203"),), "one")
    both = claim_with({name: "192.0.2.203", objects.REQUESTED[0]: "192.0.2.201"})
    assert both.wanted == (ip_address("192.0.2.201"),)


def claim_with(annotations: dict[str, str]) -> Claim:
    made = a_service("web", annotations=annotations)
    found = read_claim(made)
    assert found and not parse(made).warnings
    return found


def test_a_wanted_address_is_given_and_the_former_one_kept_until_then() -> None:
    """A Service may name a free address of each family, by annotation or by loadBalancerIP."""
    assert ips(balanced("web", wanted="192.0.2.203, 2001:db8::2", ipFamilies=BOTH)) == {
        "web": "192.0.2.203 2001:db8::2"
    }
    assert ips(balanced("web", loadBalancerIP="192.0.2.203")) == {"web": "192.0.2.203"}
    taken = balanced("web", "192.0.2.200", wanted="192.0.2.201"), balanced("a", "192.0.2.201")
    assert ips(*taken)["web"] == "192.0.2.200"
    assert ips(taken[0])["web"] == "192.0.2.201"


@pytest.mark.parametrize(
    "wanted",
    [
        "192.0.2.201,192.0.2.202",
        ",".join(["192.0.2.201"] * 9000),
        "a",
        "127.0.0.1",
        ",",
        "x" * 9000,
    ],
)
def test_what_cannot_be_read_gets_nothing(wanted: str) -> None:
    """Two addresses of one family, thousands, or none that a Service may have: it is told why."""
    found = allotted(balanced("web", wanted=wanted))["web"]
    assert found.addresses == ()
    assert found.problem.startswith("metadata.annotations[ebpflb.io/load-balancer-ips]: ")
    assert len(found.problem) < 250


def test_pools_that_run_out() -> None:
    """The fifth Service of four addresses gets none, and is told; so is who has no family."""
    claims = [balanced(f"s{n}", created=n) for n in range(5)]
    none_left = "no pool of its namespace has a free IPv4 address"
    assert ips(*claims)["s4"] == "" and problem("s4", *claims) == none_left
    only_v6 = parse_pools(["2001:db8::-2001:db8::3"])
    assert problem("s0", claims[0], pools=only_v6) == none_left
    both = balanced("both", ipFamilies=BOTH)
    assert allotted(both, pools=only_v6)["both"][1:] == ((ip_address("2001:db8::"),), "")


def ports(*numbers: int) -> list[dict[str, Any]]:
    return [{"port": number, "name": str(number)} for number in numbers]


def test_services_of_one_namespace_share_an_address() -> None:
    """By the same text of the annotation, and with different ports."""
    web = balanced("web", created=1, sharing="one", ports=ports(80))
    tls = balanced("tls", created=2, sharing="one", ports=ports(443))
    dns = balanced("dns", created=3, sharing="one", ports=ports(80, 53))
    assert ips(web, tls, dns) == {"web": "192.0.2.200", "tls": "192.0.2.200", "dns": "192.0.2.201"}
    udp = [{"port": 80, "protocol": "UDP"}]
    assert ips(web, balanced("udp", created=2, sharing="one", ports=udp))["udp"] == "192.0.2.200"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"namespace": "evil", "sharing": "one"}, OTHERS),
        ({"sharing": "two"}, "Service shop/web has it"),
        ({}, "Service shop/web has it"),
        ({"sharing": "one", "ports": ports(80)}, "Service shop/web has it, with the same port"),
        (
            {"sharing": "one", "externalTrafficPolicy": "Local"},
            "Service shop/web has it; Services with externalTrafficPolicy Local share no address",
        ),
    ],
)
@pytest.mark.parametrize("held", [False, True])
def test_no_port_of_anothers_address_is_stolen(other: dict[str, Any], why: str, held: bool) -> None:
    """Nobody gets a port of another namespace's address, or one that is taken; nor keeps it, if it
    was written into his status.
    """
    web = balanced("web", "192.0.2.200", created=1, sharing="one", ports=ports(80))
    fields: dict[str, Any] = {"created": 2, "ports": ports(443), **other}
    thief = balanced("x", "192.0.2.200", **fields)
    if not held:
        thief = balanced("x", wanted="192.0.2.200", **fields)
    found = allotted(web, thief)
    assert found["web"].addresses == (ip_address("192.0.2.200"),)
    assert ip_address("192.0.2.200") not in found["x"].addresses
    assert found["x"].problem.endswith(f": {why}")


def test_a_pool_for_the_namespaces_with_a_label() -> None:
    """Others get no address of it; its own namespaces get it first."""
    pools = parse_pools(["192.0.2.200-192.0.2.203", "198.51.100.0@team=a"])
    how: Any = {"pools": pools, "shop": {"team": "a"}}
    web, other = balanced("web"), balanced("other", namespace="evil", wanted="198.51.100.0")
    second = balanced("second", created=1)
    expected = {"web": "198.51.100.0", "second": "192.0.2.200", "other": ""}
    assert ips(web, second, other, **how) == expected
    assert problem("other", web, other, **how) == (
        "198.51.100.0 is not given to it: its pool is not for this namespace"
    )
    held = balanced("other", "198.51.100.0", namespace="evil")
    assert ips(held, **how) == {"other": "192.0.2.200"}


def test_a_status_that_others_wrote_is_corrected() -> None:
    """Addresses outside of the pools, too many of them, and hostnames give way."""
    strange = balanced("a", "10.0.0.1"), balanced("b", "192.0.2.201", "192.0.2.202", "192.0.2.203")
    found = allotted(*strange)
    assert [found[it].addresses for it in "ab"] == [
        (ip_address("192.0.2.200"),),
        (ip_address("192.0.2.201"),),
    ]
    hostname = balanced("c")._replace(held=(None,))
    assert not any(it.is_written for it in [*found.values(), *allotted(hostname).values()])


NAMES = st.lists(st.sampled_from("abcdefgh"), unique=True)
PLACES = st.lists(st.sampled_from([f"192.0.2.{n}" for n in range(198, 206)]), max_size=2)


@given(st.data())
def test_nothing_is_given_twice_and_all_is_settled(data: st.DataObject) -> None:
    """Whatever is held or wanted: no two Services have an address that they may not share, all are
    in the pools, and a second look takes nothing away from who has what it wants.
    """
    claims = [
        balanced(
            name,
            *data.draw(PLACES),
            created=data.draw(st.integers(1, 3)),
            sharing=data.draw(st.sampled_from([None, "one"])),
            wanted=data.draw(st.sampled_from([None, "192.0.2.201", "192.0.2.205"])),
            namespace=data.draw(st.sampled_from(["shop", "evil"])),
            ports=ports(data.draw(st.sampled_from([80, 443]))),
        )
        for name in data.draw(NAMES)
    ]
    found = allotted(*claims)
    users: dict[Address, list[Claim]] = {}
    for each in found.values():
        for address in each.addresses:
            assert POOL[0].has(address)
            users.setdefault(address, []).append(each.claim)
    for its in users.values():
        assert len({(it.key.namespace, it.sharing) for it in its}) == 1
        assert len(its) == 1 or its[0].sharing
        assert len(frozenset[Any]().union(*(it.ports for it in its))) == len(its)
    again = allotted(*(it.claim._replace(held=it.addresses) for it in found.values()))
    for it in again.values():
        has_its_wish = set(it.claim.held) >= set(it.claim.wanted)
        assert not has_its_wish or set(it.addresses) >= set(it.claim.held)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("192.0.2.9-192.0.2.1", "is not FIRST-LAST"),
        ("192.0.2.1-2001:db8::1", "is not FIRST-LAST"),
        ("127.0.0.1", "a loopback address"),
        ("192.0.2.1@", "no label follows the @"),
        ("192.0.2.1@a==b==c", "is not a label selector"),
        ("", "is not an IP address"),
        ("192.0.2.0/24,192.0.2.200", "overlap"),
        ("0.0.0.0/0", "by which nodes are probed"),
        ("240.0.0.5-240.0.0.9", "by which nodes are probed"),
    ],
)
def test_of_pools_that_cannot_be(text: str, why: str) -> None:
    """Each wrong pool is refused with the reason."""
    with pytest.raises(ValueError, match=why):
        parse_pools([text])


def test_pools_are_shown_as_they_are_read() -> None:
    """What is shown means the same pools."""
    texts = ["192.0.2.0/29,192.0.2.9", "2001:db8::/64,192.0.2.16/31@team in (a,b),!old"]
    pools = parse_pools(texts)
    assert show_pools(pools) == [
        "192.0.2.1-192.0.2.6,192.0.2.9",
        "2001:db8::1-2001:db8::ffff:ffff:ffff:ffff,192.0.2.16-192.0.2.17@team in (a,b),!old",
    ]
    assert parse_pools(show_pools(pools)) == pools


def test_external_ips_of_a_pool_are_not_served() -> None:
    """No one takes an address of the pools as an externalIP: only the agents give them away."""
    wanted = builders.service(externalIPs=["192.0.2.200", "203.0.113.1"])
    found = parse(wanted, Admission(pools=POOL))
    assert found.ports[0].external_ips == (ip_address("203.0.113.1"),)
    assert found.warnings == ("spec.externalIPs: 192.0.2.200 is not served: --l2-pool has it",)


def test_the_order_of_nodes() -> None:
    """When a node goes the order of the others stays, and names are spread over all nodes."""
    nodes = [f"n{n}" for n in range(10)]
    firsts = set()
    for name in map(str, range(200)):
        order = ranked(name, nodes)
        firsts.add(order[0])
        assert ranked(name, set(nodes) - {"n3"}) == [it for it in order if it != "n3"]
    assert firsts == set(nodes)


# The agent's own copy.


def stored(*claimed: Any, pools: Pools = POOL) -> Claims:
    claims = Claims(pools)
    for name, held, fields in claimed:
        claims.store(Key("shop", name), a_service(name, *held, **fields))
    return claims


def a_service(name: str, *held: str, **fields: Any) -> Any:
    fields = {"type": "LoadBalancer", "loadBalancerClass": CLASS, **fields}
    return builders.service(name=name, ingress=[{"ip": it} for it in held], **fields)


def test_who_lacks_nothing_needs_no_look() -> None:
    """A Service with an address of each family of the pools, and no other one's, is settled."""
    claims = stored(
        ("web", ["192.0.2.200"], {}),
        ("none", [], {}),
        ("twice", ["192.0.2.202"], {}),
        ("again", ["192.0.2.202"], {}),
        ("far", ["192.0.2.1"], {}),
    )
    changed, may_be_free = claims.take_changed()
    assert {it.name for it in changed if claims.is_settled(it)} == {"web"}
    assert (claims.take_changed(), may_be_free) == ((set(), False), False)
    claims.drop(Key("shop", "again"))
    changed, may_be_free = claims.take_changed()
    assert {it.name: claims.is_settled(it) for it in changed} == {"twice": True, "again": True}
    assert may_be_free


def test_a_service_that_asks_no_more_is_cleared() -> None:
    """Until its status is empty a Service that was of our class needs a look, as one of a type that
    has no addresses; then another Service may get the address.
    """
    claims = stored(("web", ["192.0.2.200"], {}))
    web = Key("shop", "web")
    claims.store(web, a_service("web", "192.0.2.200", type="ClusterIP"))
    assert not claims.is_settled(web)
    claims.take_changed()
    claims.store(web, a_service("web", type="ClusterIP"))
    assert claims.is_settled(web) and claims.take_changed() == ({web}, True)
    other = Key("shop", "b")
    claims.store(other, a_service("b", "192.0.2.201", type="ClusterIP"))
    assert not claims.is_settled(other)
    claims.store(other, a_service("b", "192.0.2.201", loadBalancerClass="metallb.io/l2"))
    assert not claims.is_settled(other), "it was never cleared"
    claims.drop(other)
    assert claims.is_settled(other)


def test_without_pools_nothing_is_stored() -> None:
    """With the option unset there is no copy."""
    claims = stored(("web", [], {}), pools=())
    claims.store_node(builders.node(("InternalIP", "192.0.2.1")))
    assert (claims.stored, claims.nodes, claims.take_changed()) == ({}, {}, (set(), False))


def test_pools_that_overlap_nodes_and_pods() -> None:
    """Addresses of nodes and of their pods are not given away."""
    claims = Claims(parse_pools(["192.0.2.0-192.0.2.7,10.1.0.0/16"]))
    claims.store_node(builders.node(("InternalIP", "192.0.2.0"), podCIDR="10.1.0.0/24"))
    unusable = claims.unusable({ip_address("192.0.2.1"): "it is the address of a router"}, {}, {})
    found = allot([balanced("a"), balanced("b")], claims.pools, unusable, lambda _: {})
    assert [str(*it.addresses) for it in found] == ["192.0.2.2", "192.0.2.3"]
    assert unusable.reason(ip_address("10.1.0.9")) == "it is an address of pods"
    assert unusable.reason(ip_address("10.1.1.0")) == ""


def test_which_nodes_answer() -> None:
    """Those that are Ready; if none is, all, but never one that is excluded from load balancers."""
    claims = Claims(POOL)

    def answer(**ready: str) -> set[str]:
        for name, state in ready.items():
            labels = {EXCLUDED_LABEL: ""} if name == "excluded" else {}
            made = manifests.node(name, labels=labels)
            made["status"] |= {"conditions": [{"type": "Ready", "status": state}]}
            claims.store_node(msgspec.convert(made, objects.Node))
        return {*claims.answering()}

    assert answer(excluded="True", one="True", two="False") == {"one"}
    assert answer(one="Unknown") == {"one", "two"}
    claims.drop_node("one")
    claims.drop_node("two")
    assert answer() == set()


def test_families_of_a_service() -> None:
    """Without ipFamilies the cluster IP says the family."""
    assert balanced("a", ipFamilies=None).families == (Family.IPV4,)


def test_an_invalid_service_keeps_nothing_that_it_gave_back() -> None:
    """The last valid version of a Service stays in use, but at no address of the pools that its
    status does not have any more, which may be another Service's by now.
    """
    cluster, web = ClusterState("node", admission=Admission(pools=POOL)), Key("shop", "web")
    held = "192.0.2.200", "203.0.113.9"
    wrong = {"ebpflb.io/nodeport-source-ranges": "everyone"}
    versions = (
        (a_service("web", *held), held),
        (a_service("web", *held, annotations=wrong), held),
        (a_service("web", annotations=wrong, type="ClusterIP"), held[1:]),
    )
    for version, served in versions:
        cluster.apply(Changed(Kind.SERVICE, web, ReadObject(version, "")))
        assert tuple(map(str, cluster.services[web][0].load_balancer_ips)) == served


# Who answers.


def test_which_addresses_are_announced() -> None:
    """Those of pools, once, and none that a node or a router has."""
    router = Unusable({ip_address("192.0.2.201"): "it is the address of a router"})
    claims = [
        balanced("web", "192.0.2.200", "10.0.0.1"),
        balanced("too", "192.0.2.200", created=1),
        balanced("bad", "192.0.2.201"),
    ]
    found = announced(claims, POOL, router)
    names = {str(at): [it.key.name for it in its] for at, its in found.items()}
    assert names == {"192.0.2.200": ["web", "too"]}


def test_many_addresses_are_cut_to_those_of_the_oldest() -> None:
    """A tenant with thousands of addresses takes none from older Services."""
    pools = parse_pools(["10.0.0.0/16"])
    many = [balanced(f"s{n}", f"10.0.{n >> 8}.{n & 255}", created=9) for n in range(1, 2000)]
    old = balanced("old", "10.0.99.99", created=1)
    found = announced([*many, old], pools, Unusable())
    assert len(found) == MOST_ANSWERED and ip_address("10.0.99.99") in found


def test_no_more_addresses_are_given_than_answered_for() -> None:
    """Who gets none is told so; the oldest keep theirs."""
    many = [balanced(f"s{n:04}", created=2) for n in range(MOST_ANSWERED + 1)]
    wants = balanced("wants", wanted="10.0.99.99", created=3)
    old = balanced("old", "10.0.88.88", created=1)
    found = allotted(*many, wants, old, pools=parse_pools(["10.0.0.0/16"]))
    assert sum(len(it.addresses) for it in found.values()) == MOST_ANSWERED
    assert [str(*it.addresses) for it in (found["old"], found["wants"])] == ["10.0.88.88", ""]
    why = "all Services together have 1,024 addresses already"
    assert found["s1024"].problem == why
    assert found["wants"].problem == f"10.0.99.99 is not given to it: {why}"


def test_nodes_with_endpoints_of_all() -> None:
    """Of Services that share an address, a node that serves all; if there is none, the first's."""
    assert preferred([{"a", "b"}, set(), {"b"}]) == {"b"}
    assert preferred([{"a"}, {"b"}]) == {"a"}
    assert preferred([set(), set()]) == frozenset()


def test_each_node_has_an_address_by_which_it_is_probed() -> None:
    """Of no host, another one in another cluster, and for its agent and its program."""
    found = {
        probed_address(cluster, node, what)
        for cluster in ("one", "two")
        for node in ("a", "b", "c")
        for what in (AGENT, PROGRAM)
    }
    assert len(found) == 12 and all(map(is_probed, found))
    assert not is_probed(ip_address("192.0.2.1")) and not is_probed(ip_address("2001:db8::1"))
