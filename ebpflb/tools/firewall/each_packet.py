# SPDX-License-Identifier: Apache-2.0
"""Which rules act on each packet of a connection between devices.

With --fast-forward they miss packets of established flows (docs/configuration.md). Left out are
rules after one that takes all established connections, rules for other states, NAT, which only sees
the first packet, and marks: `ip rule` shows those that routes depend on.
"""

from collections.abc import Generator, Iterator

from ebpflb.model import kube_proxy
from ebpflb.tools.firewall.rules import Chain, Rule, Table

_HOOKS = ("prerouting", "forward", "postrouting")
_STATES = frozenset({"new", "established", "related", "invalid", "untracked"})  # conntrack's
_SILENT = {"-m", "-j", "-g", "--comment", "--counter", "--ctstate", "--state"}
_TAKING = {"ACCEPT", "DROP", "REJECT"}
_DOES = {  # by target or option
    "logs": {"LOG", "NFLOG", "ULOG"},
    "changes": {"DSCP", "TOS", "TTL", "HL", "CLASSIFY"},
    "queues": {"NFQUEUE"},
    "copies": {"TEE"},
    "counts": {"--quota", "--connbytes", "--counter"},
    "limits": {"--limit", "--hashlimit-name"},
}


def each_packet(table: Table) -> Iterator[str]:
    """Yield a line for each such rule."""
    taking: dict[str, bool] = {}
    for chain in table.chains.values():
        if chain.hook in _HOOKS and not chain.is_nat:
            yield from _of_chain(table, chain, taking)


def _of_chain(table: Table, chain: Chain, taking: dict[str, bool]) -> Generator[str, None, bool]:
    """Return whether the chain takes every packet of established connections.

    ``taking`` has the results for earlier chains.
    """
    if chain.name in taking or kube_proxy.is_chain(chain.name):
        return taking.get(chain.name, False)
    taking[chain.name] = False
    for rule in chain.rules:
        states = _states(rule)
        if states and "established" not in states:
            continue
        if done := _done(rule):
            yield f"{table.title}, chain {chain.name}: {rule.text}: {done} each packet"
        takes = bool(_TAKING & rule.targets)
        for name in rule.targets & table.chains.keys():
            takes = yield from _of_chain(table, table.chains[name], taking)
        if takes and _SILENT.issuperset(option.name for option in rule.options):
            taking[chain.name] = True
            break
    return taking[chain.name]


def _done(rule: Rule) -> str:
    """Return the action; "" for tests for TCP's SYN."""
    names = {option.name for option in rule.options}
    if names & {"--tcp-flags", "--syn"}:
        return ""
    return next((word for word, causes in _DOES.items() if causes & (names | rule.targets)), "")


def _states(rule: Rule) -> frozenset[str]:
    """Return the connection states that the rule tests for; empty for any."""
    for option in rule.options:
        asked = _STATES.intersection(option.value.lower().split(","))
        if option.name in ("--ctstate", "--state") and asked:
            return _STATES - asked if option.negated else asked
    return frozenset()
