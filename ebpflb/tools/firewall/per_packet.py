# SPDX-License-Identifier: Apache-2.0
"""Rules that do something with each packet of a connection between devices: with --fast-forward
they miss those of established flows (docs/limits.md).

Left out are rules that come after one that takes all established connections, those for other
states, and NAT, which is asked for openings alone.
"""

from collections.abc import Generator, Iterator

from ebpflb.model import kube_proxy
from ebpflb.tools.firewall.rules import Chain, Option, Rule, Table, mark_and_mask

_HOOKS = ("prerouting", "forward", "postrouting")
_STATES = frozenset({"new", "established", "related", "invalid", "untracked"})  # conntrack's
_SILENT = {"-m", "-j", "-g", "--comment", "--counter", "--ctstate", "--state"}
_TAKING = {"ACCEPT", "DROP", "REJECT"}
_DOES = {  # by target or option
    "logs": {"LOG", "NFLOG", "ULOG"},
    "changes": {"DSCP", "TOS", "TTL", "HL", "CLASSIFY"},
    "marks": {"MARK", "CONNMARK"},
    "queues": {"NFQUEUE"},
    "copies": {"TEE"},
    "counts": {"--quota", "--connbytes", "--counter"},
    "limits": {"--limit", "--hashlimit-name"},
}
_MARKS = ("--set-xmark", "--set-mark", "--or-mark")


def per_packet(table: Table) -> Iterator[str]:
    """A line for each such rule."""
    taking: dict[str, bool] = {}
    for chain in table.chains.values():
        if chain.hook in _HOOKS and not chain.is_nat:
            yield from _of_chain(table, chain, taking)


def _of_chain(table: Table, chain: Chain, taking: dict[str, bool]) -> Generator[str, None, bool]:
    """Returns whether the chain takes every packet of established connections; what was returned
    of chains before stands in ``taking``.
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
    """A mark that is cleared or restored is left out, and what asks for flags of TCP: for SYN."""
    names = {option.name for option in rule.options}
    if names & {"--tcp-flags", "--syn"}:
        return ""
    targets = rule.targets if any(map(_sets_bits, rule.options)) else rule.targets - _DOES["marks"]
    return next((word for word, causes in _DOES.items() if causes & (names | targets)), "")


def _sets_bits(option: Option) -> bool:
    try:
        return option.name in _MARKS and mark_and_mask(option.value)[0] != 0
    except ValueError:
        return False


def _states(rule: Rule) -> frozenset[str]:
    """The connection states that it asks for; none for any."""
    for option in rule.options:
        asked = _STATES.intersection(option.value.lower().split(","))
        if option.name in ("--ctstate", "--state") and asked:
            return _STATES - asked if option.negated else asked
    return frozenset()
