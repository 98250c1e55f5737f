# SPDX-License-Identifier: Apache-2.0
"""Read the rules of this node, and return the findings."""

from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec import Struct

from ebpflb.kernel.netfilter import rulesets
from ebpflb.kernel.netfilter.rulesets import Printed
from ebpflb.model.kube_proxy import NFT_TABLE
from ebpflb.model.packet_path import Engine
from ebpflb.tools.firewall import read_iptables, read_nft
from ebpflb.tools.firewall.each_packet import each_packet
from ebpflb.tools.firewall.named import Frontends, Search, in_force
from ebpflb.tools.firewall.rules import Table

MOST_SHOWN = 20
_LEFT_OUT: set[tuple[str, str]] = {("ip", NFT_TABLE), ("ip6", NFT_TABLE)} | rulesets.OWN_TABLES


class FirewallSurvey(Struct):
    """The findings.

    ``named``: rules that name a Service and may not match its requests; ``per_packet``: rules that
    act on each packet; ``notes``: what could not be read, and why; ``scope``: the Services with
    which the rules were compared.
    """

    scope: str
    named: list[str]
    per_packet: list[str]
    notes: list[str]


def survey(state_directory: Path, engine: Engine) -> FirewallSurvey:
    """Read and compare all rules. Raises NodeError.

    ``engine`` is the expected one if no agent has run.
    """
    settings, frontends, known = in_force(state_directory, engine)
    scope = (
        "misses a Service" if known else "names a NodePort (Services are known only after a start)"
    )
    search, ruleset = Search(Frontends(frontends), settings), rulesets.read()
    notes = list(ruleset.unread)
    found = list(tables(ruleset.printed, notes))
    named = list(dict.fromkeys(str(each) for table in found for each in search.named(table)))
    if search.unread:
        notes.append(f"{search.unread} rules cannot be read in full: not compared")
    if len(named) > MOST_SHOWN:
        notes.append(f"{len(named) - MOST_SHOWN} more rules like these")
    per_packet = [line for table in found for line in each_packet(table)]
    return FirewallSurvey(scope, named[:MOST_SHOWN], per_packet, notes)


def tables(printed: Collection[Printed], notes: list[str]) -> Iterator[Table]:
    """Yield the tables: iptables-nft's as iptables-save prints them, others as nft does."""
    left_out = set(_LEFT_OUT)
    texts = {each.tool: each.text for each in printed}
    for tool in sorted(texts, key=lambda name: name == "nft"):
        try:
            if tool == "nft":
                yield from read_nft.read(texts[tool], left_out)
                continue
            found = read_iptables.read(texts[tool], tool)
        except (ValueError, LookupError) as error:
            notes.append(f"{tool}: its output cannot be read: {error}")
            continue
        if tool.endswith("-nft"):
            family = "ip6" if tool.startswith("ip6") else "ip"
            left_out |= {(family, table.title.rpartition(" ")[2]) for table in found}
        yield from found
