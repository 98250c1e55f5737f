# SPDX-License-Identifier: Apache-2.0
"""Tables of nftables in this network namespace, by netlink; and one of ours, that keeps NAT alive.

The kernel translates a connection by its conntrack entry, whatever has become of the rule that
made it. But with the last rule that asks for conntrack, or the last chain of type nat, it takes
its hooks off the network namespace, and every translated connection ends. So before rules go that
may be the last, ``keep_nat_hooks`` makes a table that needs both and does nothing.
"""

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nftsocket import NFT_MSG_GETCHAIN, nft_chain_msg
from pyroute2.nftables.expressions import genex
from pyroute2.nftables.main import NFTables

from ebpflb.errors import NodeError

FAMILIES = {"inet": 1, "ip": 2, "ip6": 10}
NAT_TABLE = "ebpflb-nat"
_ALL = 0
_REQUEST_AND_ACK = 5  # NLM_F_REQUEST | NLM_F_ACK
_DSTNAT = -100
_NOTHING = {errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP, errno.EPROTONOSUPPORT}
_CT_STATE, _REGISTER = 0, 1


class Name(NamedTuple):
    """A table."""

    family: str
    table: str

    def __str__(self) -> str:
        return f"table {self.family} {self.table}"


def tables() -> set[Name]:
    """Those of the families ip, ip6 and inet. Raises NodeError."""
    names = {number: family for family, number in FAMILIES.items()}
    found = _ask("nf_tables", _ALL, lambda nft: nft.get_tables())
    told = [(message["nfgen_family"], message.get_attr("NFTA_TABLE_NAME")) for message in found]
    return {Name(names[number], table) for number, table in told if number in names}


def has_chain(name: Name, chain: str) -> bool:
    """Whether the table has it. Raises NodeError."""
    message = nft_chain_msg()
    message["attrs"] = [["NFTA_CHAIN_TABLE", name.table], ["NFTA_CHAIN_NAME", chain]]
    said = message, NFT_MSG_GETCHAIN, _REQUEST_AND_ACK
    return bool(_ask(name, FAMILIES[name.family], lambda nft: nft.request_get(*said)))


def chains(name: Name) -> set[str]:
    """The table's, by name. Raises NodeError."""
    found = _ask(name, FAMILIES[name.family], lambda nft: nft.get_chains())
    own = (m for m in found if m.get_attr("NFTA_CHAIN_TABLE") == name.table)
    return {message.get_attr("NFTA_CHAIN_NAME") for message in own}


def _ask(what: object, family: int, question: Callable[[Any], Iterable[Any]]) -> list[Any]:
    """What the kernel answers: nothing where there is no such thing, or no nf_tables at all."""
    try:
        with NFTables(nfgen_family=family) as nft:
            return list(question(nft))
    except (NetlinkError, OSError) as error:
        if error.args[0] in _NOTHING:
            return []
        raise NodeError(f"{what}: {error.args[-1]}") from error


def delete(name: Name) -> None:
    """The table and all that is in it, at once. Raises NodeError."""
    with _nft(name) as nft:
        nft.table("del", name=name.table)


def keep_nat_hooks() -> None:
    """Lets what is translated by conntrack go on, both families. Raises NodeError."""
    if keeps_nat_hooks():
        return
    with _nft(Name("inet", NAT_TABLE)) as nft:
        nft.table("add", name=NAT_TABLE)
        place = {"table": NAT_TABLE, "chain": "hold"}
        nft.chain(
            "add", table=NAT_TABLE, name="hold", type="nat", hook="prerouting", priority=_DSTNAT
        )
        look = genex("ct", {"key": _CT_STATE, "dreg": _REGISTER})  # at a state, and no more
        nft.rule("add", **place, expressions=([look],))


def keeps_nat_hooks() -> bool:
    """Whether our table is there."""
    return Name("inet", NAT_TABLE) in tables()


def release_nat_hooks() -> None:
    """Takes it away. Raises NodeError."""
    delete(Name("inet", NAT_TABLE))


@contextmanager
def _nft(name: Name) -> Iterator[Any]:
    try:
        with NFTables(nfgen_family=FAMILIES[name.family]) as nft:
            yield nft
    except NetlinkError as error:
        if error.code != errno.ENOENT:
            raise NodeError(f"{name}: {error.args[1]}") from error
    except OSError as error:
        raise NodeError(f"{name}: {error.strerror}") from error
