# SPDX-License-Identifier: Apache-2.0
"""Keeps conntrack and NAT at work in this network namespace while translated connections are open.

The kernel translates a connection by its conntrack entry, also when the rule that made the entry
has been removed since. But without a rule that uses conntrack, or without a chain of type nat, the
kernel has no hooks for them in the network namespace: with the last such rule every translated
connection breaks. The table HOLD has both: a chain of type nat, and in it an expression that reads
conntrack's state and does nothing. An empty chain would not do. It is there from the removal of
kube-proxy's rules until kube-proxy's connections have ended.

FORMER is the same of an ebpflb before the engine netfilter.
"""

from pyroute2.nftables.expressions import genex

from ebpflb.errors import NodeError
from ebpflb.node import ctnetlink, nft
from ebpflb.plan.connections import DESTINATION_NAT

FORMER = nft.Name("inet", "ebpflb-conntrack")
HOLD = nft.Name("inet", "ebpflb-nat")

_CHAIN = "hold"
_DSTNAT = -100  # NF_IP_PRI_NAT_DST
_CT_STATE, _REGISTER = 0, 1  # NFT_CT_STATE, NFT_REG_VERDICT + 1


def has_dnat_connections() -> bool:
    """Whether there are connections whose destination is translated: up to the first one is read.

    True also if the kernel tracks connections and cannot list them: then there may be some.
    """
    try:
        return any(status & DESTINATION_NAT for status in ctnetlink.statuses())
    except OSError:
        return bool(ctnetlink.limit())


def keep_nat_hooks(table: nft.Name) -> bool:
    """Keeps conntrack and NAT at work for both families, whatever rules are removed.

    Returns whether anything had to be made: the table, or what others have removed of it. Raises
    NodeError where this kernel has no NAT by nf_tables.
    """
    if keeps_nat_hooks(table):
        return False
    with nft.edit(table) as edit:
        edit.table("add", name=table.table)
        chain = {"table": table.table, "name": _CHAIN}
        edit.chain("add", **chain, type="nat", hook="prerouting", priority=_DSTNAT)
        match = genex("ct", {"key": _CT_STATE, "dreg": _REGISTER})
        edit.rule("add", table=table.table, chain=_CHAIN, expressions=([match],))
    if not keeps_nat_hooks(table):  # ``edit`` takes a missing part of nf_tables for a missing table
        raise NodeError(
            f"{table}: the kernel has no NAT by nf_tables: modprobe -a nft_chain_nat nft_ct"
        )
    return True


def keeps_nat_hooks(table: nft.Name) -> bool:
    """Whether the table is there, with all that it needs. Raises NodeError."""
    return nft.has_rule(table, _CHAIN)


def release_nat_hooks(table: nft.Name) -> None:
    """Removes the table. Raises NodeError."""
    nft.delete(table)


def release_when_unused(table: nft.Name) -> bool:
    """Removes the table unless a translated connection may need it; whether it is gone now.

    Raises NodeError.
    """
    if not nft.exists(table):
        return True
    if has_dnat_connections():
        return False
    release_nat_hooks(table)
    return True
