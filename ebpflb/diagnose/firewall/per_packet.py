# SPDX-License-Identifier: Apache-2.0
"""Rules that do something with each packet of a connection between devices: with --fast-forward
they miss those of established flows (docs/limits.md).

Left out are rules that come after one that takes all established connections, those for other
states, and NAT, which is asked for openings alone.
"""

from collections.abc import Iterator

from ebpflb.diagnose.firewall.rules import Chain, Does, FirewallRule, FirewallTable
from ebpflb.model import kube_proxy

_HOOKS = ("prerouting", "forward", "postrouting")


def per_packet(table: FirewallTable) -> Iterator[str]:
    """A line for each such rule."""
    seen: set[str] = set()
    for chain in table.chains.values():
        if chain.hook in _HOOKS and not chain.is_nat and not table.of_bridges:
            yield from _of_chain(table, chain, seen)


def _of_chain(table: FirewallTable, chain: Chain, seen: set[str]) -> Iterator[str]:
    if chain.name in seen or kube_proxy.is_chain(chain.name):
        return
    seen.add(chain.name)
    for rule in chain.rules:
        if not _sees_established(rule):
            continue
        if rule.jump in table.chains:
            yield from _of_chain(table, table.chains[rule.jump], seen)
        elif rule.each:
            yield f"{table.title}, chain {chain.name}: {rule.where}: {rule.each} each packet"
        elif rule.only_states and rule.does in (Does.ACCEPT, Does.DROP):
            return


def _sees_established(rule: FirewallRule) -> bool:
    return not rule.states or "established" in rule.states
