# SPDX-License-Identifier: Apache-2.0
"""Tables of nftables in this network namespace, by netlink."""

import errno
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import transaction
from ebpflb.kernel.netfilter.transaction import TABLE_FAMILIES, Refused, Transaction
from ebpflb.kernel.netfilter.transaction import Name as Name
from ebpflb.kernel.netlink import attributes, from_text, text

# Numbers of attributes: NFTA_TABLE_NAME, NFTA_CHAIN_*, NFTA_RULE_*, NFTA_HOOK_*, NFTA_GEN_ID.
_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _RULE_CHAIN, _RULE_HANDLE = 1, 3, 4, 2, 3
_HOOK_NUMBER, _HOOK_PRIORITY, _GENERATION = 1, 2, 1
_PREROUTING, _FORWARD = 0, 2  # NF_INET_*
CONNTRACK = -200  # NF_IP_PRI_CONNTRACK
NO_SUCH_THING = {errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT}

_T = TypeVar("_T")


def tables() -> set[Name]:
    """Return the tables of the families ip, ip6 and inet. Raises NodeError."""
    return {
        Name(family, from_text(attributes(table)[_TABLE]))
        for family in TABLE_FAMILIES
        for table in _dump(Name(family, ""), transaction.GET_TABLE)
    }


def raw_tables() -> set[Name]:
    """Return the tables with a chain in PREROUTING before conntrack. Raises NodeError."""
    return _tables_at(lambda hook, priority: hook == _PREROUTING and priority < CONNTRACK)


def forward_tables() -> set[Name]:
    """Return the tables with a chain in FORWARD. Raises NodeError."""
    return _tables_at(lambda hook, _: hook == _FORWARD)


def _tables_at(is_there: Callable[[int, int], bool]) -> set[Name]:
    return {
        Name(family, from_text(found[_TABLE]))
        for family in TABLE_FAMILIES
        for found in map(attributes, _dump(Name(family, ""), transaction.GET_CHAIN))
        if _CHAIN_HOOK in found and is_there(*_place(attributes(found[_CHAIN_HOOK])))
    }


def _place(hook: Mapping[int, bytes]) -> tuple[int, int]:
    """Return the number of a base chain's hook, and its priority."""
    priority = int.from_bytes(hook[_HOOK_PRIORITY], signed=True)
    return int.from_bytes(hook[_HOOK_NUMBER]), priority


def rules(names: Iterable[Name]) -> set[tuple[Name, bytes]]:
    """Return the handles of the rules in these tables; a new rule has a new one.

    Raises NodeError.
    """
    return {
        (name, found[_RULE_HANDLE])
        for name in names
        for found in map(attributes, _dump(name, transaction.GET_RULE, text(_TABLE, name.table)))
        if from_text(found[_TABLE]) == name.table
    }


def generation() -> bytes:
    """Return a number that changes with each transaction; empty without nf_tables.

    Raises NodeError.
    """
    ask = Name("inet", "")
    none: list[bytes | None] = []
    found = _query(lambda: transaction.get(ask, transaction.GET_GENERATION, [b""]), none)
    return attributes(found[0])[_GENERATION] if found and found[0] else b""


def has_chain(name: Name, chain: str) -> bool:
    """Whether the table has the chain. Raises NodeError."""
    request = text(_TABLE, name.table) + text(_CHAIN_NAME, chain)
    return any(_query(lambda: transaction.get(name, transaction.GET_CHAIN, [request]), []))


def exists(name: Name) -> bool:
    """Whether the table exists. Raises NodeError."""
    return name in tables()


def has_rule(name: Name, chain: str) -> bool:
    """Whether the table has this chain and a rule in it. Raises NodeError."""
    wanted = text(_TABLE, name.table), text(_RULE_CHAIN, chain)
    rules = map(attributes, _dump(name, transaction.GET_RULE, *wanted))
    places = ((from_text(it[_TABLE]), from_text(it[_RULE_CHAIN])) for it in rules)
    return (name.table, chain) in places


def chains(name: Name) -> set[str]:
    """Return the names of the table's chains. Raises NodeError."""
    found = map(attributes, _dump(name, transaction.GET_CHAIN))
    return {from_text(it[_CHAIN_NAME]) for it in found if from_text(it[_TABLE]) == name.table}


def _dump(name: Name, kind: int, *wanted: bytes) -> list[bytes]:
    return _query(lambda: transaction.dump(name, kind, *wanted), [])


def _query(ask: Callable[[], _T], nothing: _T) -> _T:
    """Return the kernel's answer; nothing if there is no such table or chain, or no nf_tables."""
    try:
        return ask()
    except Refused as error:
        if error.number in NO_SUCH_THING:
            return nothing
        raise NodeError(f"nf_tables: {error.reason}") from error


def delete(name: Name) -> None:
    """Delete the table with its content, at once; a missing table is no error. Raises NodeError."""
    change = Transaction(name)
    change.add(transaction.DELETE_TABLE, text(_TABLE, name.table))
    try:
        change.commit()
    except Refused as error:
        if error.number != errno.ENOENT:
            raise
