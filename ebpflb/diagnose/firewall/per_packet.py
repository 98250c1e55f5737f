# SPDX-License-Identifier: Apache-2.0
"""Rules that do something with each packet of a connection between devices: with --fast-forward
they miss those of established flows (docs/limits.md).

Left out are rules that come after one that takes all established connections, those for other
states, and NAT, which is asked for openings alone.
"""

from collections.abc import Generator, Iterator

from ebpflb.diagnose.firewall.rules import Chain, Does, FirewallTable
from ebpflb.model import kube_proxy

_HOOKS = ("prerouting", "forward", "postrouting")


def per_packet(table: FirewallTable) -> Iterator[str]:
    """A line for each such rule."""
    taking: dict[str, bool] = {}
    for chain in table.chains.values():
        if chain.hook in _HOOKS and not chain.is_nat and not table.of_bridges:
            yield from _of_chain(table, chain, taking)


def _of_chain(
    table: FirewallTable, chain: Chain, taking: dict[str, bool]
) -> Generator[str, None, bool]:
    """Returns whether the chain takes every packet of established connections; what was returned
    of chains before stands in ``taking``.
    """
    if chain.name in taking or kube_proxy.is_chain(chain.name):
        return taking.get(chain.name, False)
    taking[chain.name] = False
    for rule in chain.rules:
        if rule.states and "established" not in rule.states:
            continue
        if rule.each:
            yield f"{table.title}, chain {chain.name}: {rule.where}: {rule.each} each packet"
        takes = rule.does in (Does.ACCEPT, Does.DROP)
        if rule.jump in table.chains:
            takes = yield from _of_chain(table, table.chains[rule.jump], taking)
        if takes and rule.only_states:
            taking[chain.name] = True
            break
    return taking[chain.name]
