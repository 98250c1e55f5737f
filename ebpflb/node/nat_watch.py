# SPDX-License-Identifier: Apache-2.0
"""Keeps the conntrack engine's nft table: what others remove of it is put back at once.

`nft flush ruleset`, or a firewall that loads its rules anew, removes all tables. Until ours is back
conntrack and NAT may be off, and services cannot be reached; so the kernel is asked to tell of
changes (NFNLGRP_NFTABLES), and the table is looked at after each removal, besides once a minute.
Nothing removes the table when the agent ends, for its flows go on.
"""

import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from ebpflb.model.events import SourceStatus
from ebpflb.node import nat
from ebpflb.node.poller import Poller

log = logging.getLogger(__name__)

NAME = "conntrack table"
INTERVAL_SECONDS = 60.0
RETRY_SECONDS = 1.0  # where the table could not be put back

_NETFILTER = 12  # NETLINK_NETFILTER
_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1
_TABLES_GROUP = 7  # NFNLGRP_NFTABLES
_TABLES = 10 << 8  # NFNL_SUBSYS_NFTABLES
_REMOVALS = {_TABLES | kind for kind in (2, 5, 8)}  # NFT_MSG_DELTABLE, _DELCHAIN, _DELRULE
_HEADER = struct.Struct("=IH")  # the begin of struct nlmsghdr
_BUFFER_SIZE = 1 << 16


class NatWatch:
    """Watches in a thread from ``start`` to ``stop``; ``emit`` gets errors, and their end.

    ``needed`` says whether the engine serves now. Where it does not, the watch removes the table
    that an earlier engine has left, as soon as no connection is translated any more. ``restored``
    counts how often something of the table was put back.
    """

    def __init__(
        self,
        emit: Callable[[SourceStatus], None],
        *,
        needed: Callable[[], bool],
        seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self.needed, self.seconds = needed, seconds
        self.restored = 0
        self._poll = Poller(NAME, self._look, emit)
        self._changes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)
        self._end = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="conntrack-table", daemon=True)

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
        os.close(self._end)

    def _run(self) -> None:
        while True:
            looked = self._poll()
            until = time.monotonic() + (self.seconds if looked else RETRY_SECONDS)
            while (left := until - time.monotonic()) > 0:
                ready, _, _ = select.select([self._changes.fileno(), self._end], [], [], left)
                if self._end in ready:
                    return
                if ready and self._removed():
                    break

    def _look(self) -> None:
        if not self.needed():
            nat.release_when_unused(nat.ENGINE)
        elif nat.keep_nat_hooks(nat.ENGINE):
            self.restored += 1
            log.warning("%s had been removed or changed by another program: put back", nat.ENGINE)

    def _removed(self) -> bool:
        """Whether anything was removed from any table, or changes were lost (ENOBUFS)."""
        try:
            data = self._changes.recv(_BUFFER_SIZE)
        except OSError:
            return True
        at, removed = 0, False
        while at < len(data):
            length, kind = _HEADER.unpack_from(data, at)
            removed |= kind in _REMOVALS
            at += (length + 3) & ~3
        return removed
