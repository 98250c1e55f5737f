# SPDX-License-Identifier: Apache-2.0
"""Keeps the nft table of the engine netfilter: what others remove of it is put back at once.

`nft flush ruleset`, or a firewall that loads its rules again, removes all tables that their process
does not own (before Linux 6.9 also ours). Until the table is back new connections to services fail;
so the kernel is asked to tell of changes (NFNLGRP_NFTABLES), and the table is looked at after each
removal, besides once a minute. Nothing removes the table when the agent ends, for its flows go on.
With --audit=report nothing is put back either.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from ebpflb.model.events import SourceStatus
from ebpflb.node import flowtable, nat
from ebpflb.node.flowtable_sync import FlowtableSync
from ebpflb.node.netlink_news import tells_of
from ebpflb.node.poller import Poller
from ebpflb.readable import readable

log = logging.getLogger(__name__)

_NAME = "netfilter table"
_INTERVAL_SECONDS = 60.0
_TABLE_RETRY_SECONDS = 1.0  # where it could not be put back, or it is not known if it is needed

_NETFILTER = 12  # NETLINK_NETFILTER
_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1
_TABLES_GROUP = 7  # NFNLGRP_NFTABLES
_TABLES = 10 << 8  # NFNL_SUBSYS_NFTABLES
# NFT_MSG_DELTABLE, _DELCHAIN, _DELRULE, _DELSET, _DELFLOWTABLE
_REMOVALS = {_TABLES | kind for kind in (2, 5, 8, 11, 24)}


class KeptTable(Protocol):
    """What is kept (agent.netfilter_sync)."""

    def differences(self) -> list[str]: ...
    def restore(self) -> list[str]: ...
    def release(self) -> None: ...


class NatWatch:
    """Watches in a thread from ``start`` to ``stop``; ``emit`` gets errors, and their end.

    ``needed`` says whether the engine serves now, or None as long as that is not known. Where it
    does not, the watch removes the table that an earlier engine has left, as soon as no connection
    is translated any more. ``lacking``: what of the table was missing or changed at the last look,
    in words. It is put back, but with ``report_only``; ``on_removed`` is called in either case.
    ``flowtable`` is that of --fast-forward; ``differs`` collects in words what was not as it had
    been written there, until it is taken.
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
        self.needed, self.seconds = needed, seconds
        self.report_only, self.on_removed = report_only, on_removed
        self.table = table
        self.lacking: list[str] = []
        self.put_back = 0  # how often
        self.flowtable = flowtable or FlowtableSync(chosen=False)
        self.flowtable.on_change = self._wake
        self.differs: list[str] = []
        self._whole = True  # the next look compares everything, not only what is to be changed
        self._poll = Poller(_NAME, self._look, emit)
        self._changes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)
        self._end, self._news = os.eventfd(0), os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="netfilter-table", daemon=True)

    def start(self) -> None:
        """Subscribes before it looks, so that no removal is missed."""
        self._changes.bind((0, 0))
        self._changes.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _TABLES_GROUP)
        self._thread.start()

    def stop(self) -> None:
        """Returns when nothing is changed any more; the table stays."""
        os.eventfd_write(self._end, 1)
        if self._thread.ident:
            self._thread.join()
        self._changes.close()
        self.flowtable.on_change = lambda: None
        for each in (self._end, self._news):
            os.close(each)

    def _wake(self) -> None:
        os.eventfd_write(self._news, 1)

    def _run(self) -> None:
        due = 0.0
        while True:
            is_known = self.needed() is not None  # before the look: it may become known during it
            looked = self._poll() and is_known
            if self._whole or not looked:
                due = time.monotonic() + (self.seconds if looked else _TABLE_RETRY_SECONDS)
            if (whole := self._wait(due)) is None:
                return
            self._whole = whole

    def _wait(self, due: float) -> bool | None:
        """Whether all is to be looked at, or only what the agent wants is new; None: it ends."""
        kernel = self._changes.fileno()
        while (left := due - time.monotonic()) > 0:
            ready = readable([kernel, self._end, self._news], left)
            if self._end in ready:
                return None
            if kernel in ready and tells_of(self._changes, _REMOVALS):
                return True
            if self._news in ready:
                os.eventfd_read(self._news)
                return False
        return True

    def _look(self) -> None:
        """Raises NodeError."""
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
        """What has differed since the last call; with ``report_only``, what differs now."""
        if self.report_only:
            return self.differs
        taken, self.differs = self.differs, []
        return taken

    def _look_at_table(self, *, needed: bool) -> None:
        if not needed:
            self.lacking = []
            self.table.release()
            nat.release_when_unused(nat.FORMER)
            return
        lacked = self.lacking
        lacking = self.table.differences() if self.report_only else self.table.restore()
        self.lacking = lacking if self.report_only else []  # in one step: other threads read it
        if lacking and not self.report_only:
            self.put_back += 1
            log.warning("put back what another program had removed: %s", "; ".join(lacking))
        if lacking and lacking != lacked:
            self.on_removed()
