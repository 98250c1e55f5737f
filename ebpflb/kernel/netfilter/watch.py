# SPDX-License-Identifier: Apache-2.0
"""Keep the nft table of the netfilter engine: parts that others remove are put back at once.

`nft flush ruleset`, or a firewall that reloads its rules, removes all tables that their process
does not own (before Linux 6.9 also ours). Until the table is back new connections to services fail.
So the watch subscribes to the kernel's notifications (NFNLGRP_NFTABLES), and checks the table after
each removal and once a minute. The table stays when the agent ends, because its flows continue.
With --audit=report nothing is put back.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

from ebpflb.entries.flows import DESTINATION_NAT
from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import conntrack, flowtable, nft
from ebpflb.kernel.netfilter.flowtable import FlowtableSync
from ebpflb.kernel.netfilter.nft import Refused
from ebpflb.kernel.netfilter.table import LOAD_CT_STATE, one_rule_table
from ebpflb.kernel.netlink import NETFILTER, Subscription
from ebpflb.model.events import SourceStatus
from ebpflb.workers import DescriptorWorker, Poller

# Keep conntrack and NAT working in this network namespace while translated connections are open.
#
# The kernel translates a connection by its conntrack entry, even after the rule that created the
# entry was removed. But without a rule that uses conntrack, or without a chain of type nat, the
# kernel has no hooks for them in the network namespace: with the last such rule every translated
# connection breaks. The table HOLD has both: a chain of type nat, and in it an expression that
# reads conntrack's state and has no effect. An empty chain would not suffice. The table exists from
# the removal of kube-proxy's rules until kube-proxy's connections have ended.

HOLD = nft.Name("inet", "ebpflb-nat")

_CHAIN = "hold"
_DSTNAT = -100  # NF_IP_PRI_NAT_DST


def has_dnat_connections() -> bool:
    """Whether there are connections with a translated destination; stops at the first one.

    True also if the kernel tracks connections and cannot list them, since some may exist.
    """
    try:
        return any(status & DESTINATION_NAT for status in conntrack.statuses())
    except OSError:
        return bool(conntrack.limit())


def keep_nat_hooks() -> None:
    """Keep conntrack and NAT working for both families, whatever rules are removed.

    Raises NodeError if this kernel has no NAT by nf_tables.
    """
    if nft.has_rule(HOLD, _CHAIN):
        return
    try:
        one_rule_table(HOLD, _CHAIN, "nat", _DSTNAT, [LOAD_CT_STATE]).commit()
    except Refused as error:
        if error.number not in nft.NO_SUCH_THING:
            raise
        raise NodeError(
            f"{HOLD}: the kernel has no NAT by nf_tables: modprobe -a nft_chain_nat nft_ct"
        ) from error


def release_when_unused(table: nft.Name) -> bool:
    """Remove the table unless a translated connection may need it; return whether it is gone.

    Raises NodeError.
    """
    if not nft.exists(table):
        return True
    if has_dnat_connections():
        return False
    nft.delete(table)
    return True


log = logging.getLogger(__name__)

_NAME = "netfilter table"
_INTERVAL_SECONDS = 60.0
TABLE_RETRY_SECONDS = 1.0  # after a failure, or while it is unknown whether the table is needed

_TABLES_GROUP = 7  # NFNLGRP_NFTABLES
_TABLES = 10 << 8  # NFNL_SUBSYS_NFTABLES
# NFT_MSG_DELTABLE, _DELCHAIN, _DELRULE, _DELSET, _DELFLOWTABLE
_REMOVALS = {_TABLES | kind for kind in (2, 5, 8, 11, 24)}


def _is_removal(kind: int, _: bytes) -> bool:
    return kind in _REMOVALS


class KeptTable(Protocol):
    """The table to keep (agent.engine)."""

    def differences(self) -> list[str]: ...
    def restore(self) -> list[str]: ...
    def release(self) -> None: ...


class NatWatch(DescriptorWorker):
    """Watch in a thread from ``start`` to ``stop``; ``emit`` gets errors and recoveries.

    ``needed`` says whether the engine is in use, or None while this is unknown. If it is not in
    use, the watch removes the table of an earlier engine as soon as no connection is translated any
    more. ``lacking``: the parts of the table that were missing or changed at the last check, in
    words. They are put back, except with ``report_only``; ``on_removed`` is called in both cases.
    ``flowtable`` belongs to --fast-forward; ``differs`` collects in words how it differed from the
    last write, until taken.
    """

    def __init__(
        self,
        emit: Callable[[SourceStatus], None],
        table: KeptTable,
        *,
        needed: Callable[[], bool | None],
        report_only: bool = False,
        on_removed: Callable[[], None] = lambda: None,
        flowtable: FlowtableSync | None = None,
        seconds: float = _INTERVAL_SECONDS,
    ) -> None:
        super().__init__("netfilter-table")
        self.needed, self.seconds = needed, seconds
        self.report_only, self.on_removed = report_only, on_removed
        self.table = table
        self.lacking: list[str] = []
        self.put_back = 0  # number of repairs
        self.flowtable = flowtable or FlowtableSync(is_wanted=False)
        self.flowtable.on_change = self._look_soon
        self.differs: list[str] = []
        self._whole = True  # the next check compares everything, not only pending changes
        self._poll = Poller(_NAME, self._look, emit)
        self._changes = Subscription(_TABLES_GROUP, protocol=NETFILTER)
        self._has_news = False  # the agent has changed its wishes for the flowtable

    def stop(self) -> None:
        """Stop; return when nothing is changed any more. The table stays."""
        self.flowtable.on_change = lambda: None
        super().stop()
        self._changes.close()

    def _look_soon(self) -> None:
        self._has_news = True
        self.wake()

    def run(self) -> None:
        due = 0.0
        while not self.stopped.is_set():
            is_known = self.needed() is not None  # before the check, which may make it known
            looked = self._poll() and is_known
            if self._whole or not looked:
                due = time.monotonic() + (self.seconds if looked else TABLE_RETRY_SECONDS)
            self._whole = self._wait_until(due)

    def _wait_until(self, due: float) -> bool:
        """Return whether everything must be checked, or only new changes written."""
        while (left := due - time.monotonic()) > 0 and not self.stopped.is_set():
            if self._has_news:
                self._has_news = False
                return False
            if self.wait([self._changes], left) and self._changes.has_news(_is_removal):
                return True
        return True

    def _look(self) -> None:
        """Check once. Raises NodeError."""
        needed = self.needed()
        if needed is None:
            return
        if self._whole:
            self._look_at_table(needed=needed)
            self._look_at_flowtable(needed=needed)
        else:
            self.flowtable.catch_up(needed=needed)

    def _look_at_flowtable(self, *, needed: bool) -> None:
        found = self.flowtable.look(needed=needed, report_only=self.report_only)
        for what in found:
            log.warning("%s: %s", flowtable.TABLE, what)
        self.differs = found if self.report_only else self.differs + found
        if found:
            self.on_removed()

    def take_differs(self) -> list[str]:
        """Return the differences since the last call; with ``report_only``, the current ones."""
        if self.report_only:
            return self.differs
        taken, self.differs = self.differs, []
        return taken

    def _look_at_table(self, *, needed: bool) -> None:
        if not needed:
            self.lacking = []
            self.table.release()
            return
        lacked = self.lacking
        lacking = self.table.differences() if self.report_only else self.table.restore()
        self.lacking = lacking if self.report_only else []  # in one step: other threads read it
        if lacking and not self.report_only:
            self.put_back += 1
            log.warning("put back what another program had removed: %s", "; ".join(lacking))
        if lacking and lacking != lacked:
            self.on_removed()
