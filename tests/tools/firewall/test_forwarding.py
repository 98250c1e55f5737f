# SPDX-License-Identifier: Apache-2.0
"""What FORWARD does with an outside client's request to a pod, with the rules of known programs."""

import json
import re
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.kernel.netfilter.firewall import Table, read_nft
from ebpflb.tools.firewall import Fate, Packet, Way, fates, may_drop
from tests.tools.firewall.services import RECORDED, of_iptables

ACCEPT, DROP, DROP_OF_ONE = Fate.ACCEPT, Fate.DROP, Fate.DROP_OF_ONE
POD = "10.244.1.7/32"
# The rules of known programs, which have a heading each.
RULES = re.findall(r"# .+\n((?:-A .+\n)+)", (RECORDED / "forward.rules").read_text())
PROGRAMS = [tuple(each.splitlines()) for each in RULES]
KUBE, DOCKER, PODMAN, CNI_FIREWALL, UFW, UFW_ROUTE, CALICO, KUBE_ROUTER, POLICIES = PROGRAMS
ESTABLISHED = "-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
REJECT = "-A FORWARD -j REJECT --reject-with icmp-host-prohibited"
DROPPED = {  # by policy, if not said otherwise
    "nothing": ("DROP",),
    "Docker": ("DROP", *DOCKER),
    "Podman": ("DROP", *PODMAN),
    "the plugin firewall": ("DROP", *CNI_FIREWALL),
    "ufw": ("DROP", *UFW),
    "ufw, reject": ("ACCEPT", *UFW, "-A ufw-reject-forward -j REJECT"),
    "another port": ("DROP", "-A FORWARD -p tcp -m multiport --dports 22,443 -j ACCEPT"),
    "another protocol": ("DROP", "-A FORWARD -p udp -j ACCEPT", "-A FORWARD ! -p tcp -j ACCEPT"),
    "all but the uplink": ("DROP", "-A FORWARD ! -i eth+ -j ACCEPT"),
    "only established": ("DROP", "-A FORWARD -m state ! --state NEW,INVALID -j ACCEPT"),
    "a last rule": ("ACCEPT", ESTABLISHED, REJECT),
    "a drop before": ("ACCEPT", "-A FORWARD -o cni0 -j DROP", "-A FORWARD -j ACCEPT"),
    "the pods' network": ("ACCEPT", "-A FORWARD -d 10.244.0.0/16 -j DROP"),
    "a chain": ("ACCEPT", "-A FORWARD -j END", "-A END -j DROP"),
    "a goto": ("DROP", "-A FORWARD -g END", "-A FORWARD -j ACCEPT", "-A END -p udp -j DROP"),
}
ACCEPTED = {
    "Flannel": ("DROP", "-A FORWARD -j FLANNEL-FWD", "-A FLANNEL-FWD -d 10.244.0.0/16 -j ACCEPT"),
    "Cilium": ("DROP", "-A FORWARD -o cni+ -m comment --comment any->cluster -j ACCEPT"),
    "translated": ("DROP", "-A FORWARD -m conntrack --ctstate DNAT -j ACCEPT"),
    "ufw, a route": ("DROP", *UFW, *UFW_ROUTE),
    "ufw, routed": ("ACCEPT", *UFW),
    "an input of its own": ("ACCEPT", "-A INPUT -j DROP"),
    "a chain that nothing uses": ("ACCEPT", "-A OLD -j DROP"),
    "a drop of other traffic": (
        "ACCEPT",
        "-A FORWARD -o docker0 -j DROP",
        "-A FORWARD -p udp -j DROP",
    ),
    "a loop": ("DROP", "-A FORWARD -j END", "-A END -j END", "-A FORWARD -i eth0 -j ACCEPT"),
}
MAYBE = {  # it depends on what is not known of the packet
    "Calico": ("DROP", *CALICO),
    "kube-network-policies": ("DROP", *POLICIES),
    "clients' network": ("DROP", "-A FORWARD -s 198.51.100.0/24 -j ACCEPT"),
    "the node's network": ("DROP", "-A FORWARD -s 192.0.2.0/24 -j ACCEPT"),
    "a drop of some clients": ("ACCEPT", "-A FORWARD -s 203.0.113.9/32 -j DROP"),
    "an unreadable match": ("DROP", "-A FORWARD -d 10.244.1.x -j ACCEPT"),
    "a rate": ("ACCEPT", "-A FORWARD -m limit --limit 9/sec -j ACCEPT", "-A FORWARD -j DROP"),
}


TARGETS = {"ACCEPT", "DROP", "REJECT", "RETURN", "MARK", "LOG", "NFLOG", "NFQUEUE"}


def table(policy: str, *rules: str) -> Table:
    chains = {name for rule in rules for name in re.findall(r"-[Ajg] ([\w-]+)", rule)}
    chains -= {"FORWARD", "INPUT", *TARGETS}
    heads = [f":FORWARD {policy} [0:0]", ":INPUT ACCEPT [0:0]"]
    heads += [f":{chain} - [0:0]" for chain in chains]
    (parsed,) = of_iptables("\n".join(["*filter", *heads, *rules, "COMMIT"]))
    return parsed


def request(*, marked: bool = True, dnat: bool = True) -> Packet:
    """Return a request by eth0 to a pod behind cni0, beside docker0 and a bridge of Podman."""
    pod, node = ip_address("10.244.1.7"), ip_address("192.0.2.1")
    bridges = map(ip_address, ("10.244.1.1", "172.17.0.1", "10.88.0.1"))
    way = Way("eth0", frozenset({node}), frozenset(bridges))
    return Packet(pod, 8080, way, "cni0", marked, dnat)


def outcome(of: Table, packet: Packet | None = None, *, with_kube_proxy: bool = False) -> set[Fate]:
    (chain,) = (it for it in of.chains.values() if it.hook == "forward")
    found = fates(of, chain, packet or request(), with_kube_proxy=with_kube_proxy)
    assert may_drop(of, chain) or DROP not in found
    return set(found)


@pytest.mark.parametrize("rules", DROPPED.values(), ids=DROPPED)
def test_dropped_by_default(rules: tuple[str, ...]) -> None:
    """All clients are dropped; kube-proxy's chains, while they exist, accept marked packets."""
    assert outcome(table(*rules)) == {DROP}
    policy, *others = rules
    both = table(policy, *KUBE, *others)
    assert outcome(both) == {DROP}
    assert outcome(both, with_kube_proxy=True) == {ACCEPT}
    assert outcome(both, request(marked=False), with_kube_proxy=True) == {DROP}


@pytest.mark.parametrize("rules", ACCEPTED.values(), ids=ACCEPTED)
def test_without_a_rule_the_policy_decides(rules: tuple[str, ...]) -> None:
    """If no rule matches the request, the policy decides."""
    assert outcome(table(*rules)) == {ACCEPT}


@pytest.mark.parametrize("rules", MAYBE.values(), ids=MAYBE)
def test_an_unknown_match_has_both_outcomes(rules: tuple[str, ...]) -> None:
    """If it is unknown whether a rule matches, the request may be accepted or dropped."""
    assert outcome(table(*rules)) == {ACCEPT, DROP}


def test_the_flow_tables_translate_without_conntrack() -> None:
    """A rule for packets translated by conntrack does not match them."""
    assert outcome(table(*ACCEPTED["translated"]), request(dnat=False)) == {DROP}


@pytest.mark.parametrize("policy", ["ACCEPT", "DROP"])
def test_a_drop_for_one_pod_is_that_pods(policy: str) -> None:
    """A drop in a pod's own chain, or by a rule for the pod, such as a network policy's, concerns
    that pod only.
    """
    assert DROP_OF_ONE in outcome(table("ACCEPT", *KUBE_ROUTER))
    assert DROP not in outcome(table("ACCEPT", *KUBE_ROUTER))
    assert outcome(table(policy, f"-A FORWARD -d {POD} -j DROP")) == {DROP_OF_ONE}
    chain = (f"-A FORWARD -d {POD} -j ONE", "-A ONE -s 203.0.113.0/24 -j ACCEPT", "-A ONE -j DROP")
    assert outcome(table(policy, *chain)) == {ACCEPT, DROP_OF_ONE}


def payload(protocol: str, field: str) -> dict[str, Any]:
    return {"payload": {"protocol": protocol, "field": field}}


def match(left: object, right: object) -> dict[str, Any]:
    return {"match": {"op": "==", "left": left, "right": right}}


STATE, STATUS = {"ct": {"key": "state"}}, {"ct": {"key": "status"}}
IIFNAME, OIFNAME = ({"meta": {"key": f"{way}ifname"}} for way in "io")
KNOWN = match(STATE, ["established", "related"]), {"accept": None}
ADMIN_PROHIBITED = ({"reject": {"type": "icmpx", "expr": "admin-prohibited"}},)
FIREWALLD: dict[str, list[Any]] = {
    "filter_FORWARD": [
        KNOWN,
        (match(STATUS, "dnat"), {"accept": None}),
        (match(IIFNAME, "lo"), {"accept": None}),
        (match(STATE, "invalid"), {"drop": None}),
        (
            match(payload("ip6", "daddr"), {"set": [{"prefix": {"addr": "::", "len": 96}}]}),
            *ADMIN_PROHIBITED,
        ),
        ({"jump": {"target": "filter_FORWARD_ZONES"}},),
        ADMIN_PROHIBITED,
    ],
    "filter_FORWARD_ZONES": [
        (match(IIFNAME, "eth0"), {"goto": {"target": "filter_FWD_public"}}),
        ({"goto": {"target": "filter_FWD_public"}},),
    ],
    "filter_FWD_public": [
        ({"jump": {"target": "filter_FWD_public_allow"}},),
        (match({"meta": {"key": "l4proto"}}, {"set": ["icmp", "ipv6-icmp"]}), {"accept": None}),
    ],
    "filter_FWD_public_allow": [],
}
TRUSTED = [(match(OIFNAME, "cni0"), {"accept": None})]
NETWORK_POLICIES = {
    "forward": [
        (match(payload("icmpv6", "type"), "nd-neighbor-solicit"), {"accept": None}),
        KNOWN,
        (match(payload("ip", "daddr"), "@podips"), {"queue": {"num": 100, "flags": "bypass"}}),
    ]
}


def of_nft(chains: dict[str, list[Any]], policy: str = "accept") -> Table:
    """Return chains, the first of which is the base chain."""
    place = {"family": "inet", "table": "t"}
    base = {"type": "filter", "hook": "forward", "prio": 10, "policy": policy}
    objects: list[Any] = [{"table": {"family": "inet", "name": "t"}}]
    objects.append({"set": {**place, "name": "podips", "elem": ["10.244.1.7", "10.244.1.8"]}})
    for at, name in enumerate(chains):
        objects.append({"chain": {**place, "name": name, **(base if not at else {})}})
    for name, rules in chains.items():
        for handle, rule in enumerate(rules):
            objects.append({"rule": {**place, "chain": name, "handle": handle, "expr": list(rule)}})
    return read_nft(json.dumps({"nftables": objects}))


def test_firewalld_accepts_translated_packets() -> None:
    """firewalld accepts packets translated by conntrack, and rejects other packets to a zone's
    devices.
    """
    there = of_nft(FIREWALLD)
    assert outcome(there) == {ACCEPT}
    assert outcome(there, request(dnat=False)) == {DROP}
    trusting = of_nft(FIREWALLD | {"filter_FWD_public_allow": TRUSTED})
    assert outcome(trusting, request(dnat=False)) == {ACCEPT}


def test_a_policy_of_nft_and_a_queue() -> None:
    assert outcome(of_nft({"forward": [KNOWN]}, "drop")) == {DROP}
    assert outcome(of_nft(NETWORK_POLICIES)) == {ACCEPT}
    assert outcome(of_nft(NETWORK_POLICIES, "drop")) == {ACCEPT}
