# SPDX-License-Identifier: Apache-2.0
"""Tables of nftables in this network namespace, by netlink."""

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nftsocket import (
    NFT_MSG_GETCHAIN,
    NFT_MSG_GETRULE,
    nft_chain_msg,
    nft_rule_msg,
)
from pyroute2.nftables.main import NFTables

from ebpflb.errors import NodeError

TABLE_FAMILIES = {"inet": 1, "ip": 2, "ip6": 10}
_ALL = 0
_REQUEST_AND_ACK = 5  # NLM_F_REQUEST | NLM_F_ACK
NO_SUCH_THING = {errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT}


class Name(NamedTuple):
    """The name of a table."""

    family: str
    table: str

    def __str__(self) -> str:
        return f"table {self.family} {self.table}"


def tables() -> set[Name]:
    """Return the tables of the families ip, ip6 and inet. Raises NodeError."""
    names = {number: family for family, number in TABLE_FAMILIES.items()}
    found = _query("nf_tables", _ALL, lambda nft: nft.get_tables())
    found_names = [
        (message["nfgen_family"], message.get_attr("NFTA_TABLE_NAME")) for message in found
    ]
    return {Name(names[number], table) for number, table in found_names if number in names}


def has_chain(name: Name, chain: str) -> bool:
    """Whether the table has the chain. Raises NodeError."""
    message = nft_chain_msg()
    message["attrs"] = [["NFTA_CHAIN_TABLE", name.table], ["NFTA_CHAIN_NAME", chain]]
    request = message, NFT_MSG_GETCHAIN, _REQUEST_AND_ACK
    return bool(_query(name, TABLE_FAMILIES[name.family], lambda nft: nft.request_get(*request)))


def exists(name: Name) -> bool:
    """Whether the table exists. Raises NodeError."""
    return name in tables()


def has_rule(name: Name, chain: str) -> bool:
    """Whether the table has this chain and a rule in it. Raises NodeError."""
    message = nft_rule_msg()
    message["attrs"] = [["NFTA_RULE_TABLE", name.table], ["NFTA_RULE_CHAIN", chain]]
    request = message, NFT_MSG_GETRULE  # the kernel lists the rules of this chain only
    found = _query(name, TABLE_FAMILIES[name.family], lambda nft: nft.request_get(*request))
    places = ((m.get_attr("NFTA_RULE_TABLE"), m.get_attr("NFTA_RULE_CHAIN")) for m in found)
    return (name.table, chain) in places


def chains(name: Name) -> set[str]:
    """Return the names of the table's chains. Raises NodeError."""
    found = _query(name, TABLE_FAMILIES[name.family], lambda nft: nft.get_chains())
    own = (m for m in found if m.get_attr("NFTA_CHAIN_TABLE") == name.table)
    return {message.get_attr("NFTA_CHAIN_NAME") for message in own}


def _query(what: object, family: int, query: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """Return the kernel's answer; empty if there is no such table or chain, or no nf_tables."""
    try:
        with NFTables(nfgen_family=family) as nft:
            return list(query(nft))
    except (NetlinkError, OSError) as error:
        if error.args[0] in NO_SUCH_THING:
            return []
        raise NodeError(f"{what}: {error.args[-1]}") from error


def delete(name: Name) -> None:
    """Delete the table with its content, at once. Raises NodeError."""
    with edit(name) as nft:
        nft.table("del", name=name.table)


@contextmanager
def edit(name: Name) -> Iterator[Any]:
    """Change the table; a missing table is no error. Raises NodeError."""
    try:
        with NFTables(nfgen_family=TABLE_FAMILIES[name.family]) as nft:
            yield nft
    except NetlinkError as error:
        if error.code != errno.ENOENT:
            raise NodeError(f"{name}: {error.args[1]}") from error
    except OSError as error:
        raise NodeError(f"{name}: {error.strerror}") from error
