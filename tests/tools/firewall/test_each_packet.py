# SPDX-License-Identifier: Apache-2.0
"""Rules that act on each packet of a connection, which --fast-forward would bypass."""

from collections.abc import Callable, Iterator

import pytest

from ebpflb.kernel.netfilter.each_packet import each_packet, for_invalid
from ebpflb.kernel.netfilter.firewall import Table
from tests.tools.firewall.services import of_iptables

EACH = [
    ("FORWARD", "-j LOG", "logs"),
    ("FORWARD", "-s 192.0.2.0/24 -m limit --limit 10/sec -j ACCEPT", "limits"),
    ("FORWARD", "-m quota --quota 1000 -j ACCEPT", "counts"),
    ("FORWARD", "-m conntrack --ctstate RELATED,ESTABLISHED -j NFQUEUE --queue-num 1", "queues"),
    ("FORWARD", "-m conntrack ! --ctstate NEW -j NFLOG", "logs"),
    ("POSTROUTING", "-j DSCP --set-dscp 0x08", "changes"),
    ("PREROUTING", "-i eth0 -j LOG", "logs"),
]
OPENINGS = [
    ("FORWARD", "-s 192.0.2.7/32 -j DROP"),
    ("FORWARD", "-m conntrack --ctstate NEW -j LOG"),
    ("FORWARD", "-p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"),
    ("FORWARD", "-m conntrack ! --ctstate ESTABLISHED -j LOG"),
    ("FORWARD", "-j MARK --set-xmark 0x9/0x9"),
    ("INPUT", "-j LOG"),
    ("OUTPUT", "-j LOG"),
]
TABLE = {"POSTROUTING": "mangle", "PREROUTING": "mangle"}


INVALID = [
    ("FORWARD", "-m conntrack --ctstate INVALID -j DROP"),
    ("FORWARD", "-m state --state NEW,INVALID -j before"),
    ("INPUT", "-m conntrack ! --ctstate RELATED,ESTABLISHED -j DROP"),
]
NOT_INVALID = [
    ("FORWARD", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"),
    ("FORWARD", "-m conntrack ! --ctstate INVALID -j ACCEPT"),
    ("FORWARD", "-m conntrack --ctstate DNAT -j ACCEPT"),
    ("FORWARD", '-m comment --comment "--ctstate INVALID" -j DROP'),
    ("FORWARD", "-m set --match-set banned dst -j DROP"),
]


def found(
    chain: str,
    *texts: str,
    before: str = "",
    lines: Callable[[Table], Iterator[str]] = each_packet,
) -> list[str]:
    """Return the findings for these rules of a chain; chain "before" has rules too."""
    saved = "".join(f"-A {chain} {text}\n" for text in texts)
    chains = f":{chain} ACCEPT [0:0]\n:before - [0:0]\n"
    chains += f"-A before {before}\n" if before else ""
    saved = f"*{TABLE.get(chain, 'filter')}\n{chains}{saved}COMMIT\n"
    return [line for each in of_iptables(saved, "iptables") for line in lines(each)]


@pytest.mark.parametrize(("chain", "text", "done"), EACH)
def test_rules_that_work_on_each_packet_are_named(chain: str, text: str, done: str) -> None:
    """Each rule is named with its effect."""
    table = TABLE.get(chain, "filter")
    assert found(chain, text) == [
        f"iptables, table {table}, chain {chain}: {text}: {done} each packet"
    ]


@pytest.mark.parametrize(("chain", "text"), OPENINGS)
def test_rules_for_openings_are_not(chain: str, text: str) -> None:
    """Rules for opening packets are not named: fast forward begins after a flow has been
    answered.
    """
    assert not found(chain, text)


def test_what_comes_after_established_connections_were_accepted_is_not() -> None:
    """Rules after the acceptance of established connections never see these, with or without
    --fast-forward.
    """
    accept = "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
    assert not found("FORWARD", accept, "-j LOG")
    assert found("FORWARD", f"-s 192.0.2.0/24 {accept}", "-j LOG")


JUMPS = [
    ("-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", ["-j before", "-j LOG"], 0),
    ("-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN", ["-j before", "-j LOG"], 1),
    ("-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", ["-i eth0 -j before", "-j LOG"], 1),
    ("-j LOG", ["-m conntrack --ctstate NEW -j before"], 0),
    ("-j LOG", ["-m limit --limit 1/sec -j before"], 2),
]


@pytest.mark.parametrize(("before", "texts", "count"), JUMPS)
def test_chains_that_others_jump_to_count(before: str, texts: list[str], count: int) -> None:
    """ufw's and firewalld's rules accept established connections in such a chain."""
    assert len(found("FORWARD", *texts, before=before)) == count


@pytest.mark.parametrize(("chain", "text"), INVALID)
def test_rules_for_invalid_packets_are_named(chain: str, text: str) -> None:
    """A rule asks for them by name, in a list, or by excluding other states."""
    assert found(chain, text, lines=for_invalid) == [
        f"iptables, table filter, chain {chain}: {text}: asks for ct state invalid"
    ]


@pytest.mark.parametrize(("chain", "text"), NOT_INVALID)
def test_other_rules_are_not_for_invalid_packets(chain: str, text: str) -> None:
    """Other states, their exclusion, comments and ipsets do not ask for them."""
    assert not found(chain, text, lines=for_invalid)
