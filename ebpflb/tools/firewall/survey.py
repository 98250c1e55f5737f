# SPDX-License-Identifier: Apache-2.0
"""Read the rules of this node, and return the findings."""

from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec import Struct, structs

from ebpflb.kernel.netfilter import rulesets
from ebpflb.kernel.netfilter.rulesets import Printed
from ebpflb.model.kube_proxy import NFT_TABLE
from ebpflb.model.packet_path import Engine
from ebpflb.tools.firewall import read_iptables, read_nft
from ebpflb.tools.firewall.each_packet import each_packet
from ebpflb.tools.firewall.named import Frontends, Search, in_force, not_compared
from ebpflb.tools.firewall.rules import Table

MOST_SHOWN = 20
_NOT_COMPARED = "rules at this hook are not compared: check whether they name Services"
_LEFT_OUT: set[tuple[str, str]] = {("ip", NFT_TABLE), ("ip6", NFT_TABLE)} | rulesets.OWN_TABLES


class FirewallSurvey(Struct):
    """The findings.

    ``found``: each rule that names a Service and may not match its requests, and the remedy;
    ``notes``: rules that were not compared, and why; ``scope``: the Services with which the rules
    were compared; ``per_packet``: the rules that act on each packet.
    """

    scope: str
    found: list[tuple[str, str]] = []
    notes: list[str] = []
    per_packet: list[str] = []


def survey(state_directory: Path, engine: Engine) -> FirewallSurvey:
    """Read and compare all rules. Raises NodeError.

    ``engine`` is the expected one if no agent has run.
    """
    settings, frontends, known = in_force(state_directory, engine)
    scope = (
        "misses a Service" if known else "names a NodePort (Services are known only after a start)"
    )
    result = FirewallSurvey(scope)
    search = Search(Frontends(frontends), settings)
    ruleset = rulesets.read()
    result.notes += ruleset.unread
    for table in tables(ruleset.printed, result.notes):
        result.found += [(str(found), found.remedy) for found in search.named(table)]
        result.notes += [f"{chain}: {_NOT_COMPARED}" for chain in not_compared(table)]
        result.per_packet += each_packet(table)
    result.notes += _incomplete(search)
    return _shortened(result)


def tables(printed: Collection[Printed], notes: list[str]) -> Iterator[Table]:
    """Yield the tables: iptables-nft's as iptables-save prints them, others as nft does."""
    left_out = set(_LEFT_OUT)
    texts = {each.tool: each.text for each in printed}
    for tool in sorted(texts, key=lambda name: name == "nft"):
        try:
            if tool == "nft":
                yield from read_nft.read(texts[tool], left_out)
                continue
            found = read_iptables.read(texts[tool].decode(errors="replace"), tool)
        except (ValueError, LookupError) as error:
            notes.append(f"{tool}: its output cannot be read: {error}")
            continue
        if tool.endswith("-nft"):
            family = "ip6" if tool.startswith("ip6") else "ip"
            left_out |= {(family, table.title.rpartition(" ")[2]) for table in found}
        yield from found


def _incomplete(search: Search) -> Iterator[str]:
    if search.skipped:
        yield f"{search.skipped} rules cannot be read in full: not compared"
    if not search.steps:
        yield "too many rules and Services: not all were compared"


def _shortened(result: FirewallSurvey) -> FirewallSurvey:
    found, notes = list(dict.fromkeys(result.found)), list(dict.fromkeys(result.notes))
    if len(found) > MOST_SHOWN:
        notes.append(f"{len(found) - MOST_SHOWN} more rules like these")
    return structs.replace(result, found=found[:MOST_SHOWN], notes=notes[:MOST_SHOWN])
