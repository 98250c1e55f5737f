# SPDX-License-Identifier: Apache-2.0
"""Tells at once that something may have been taken away that the agent has attached or pinned.

Two kinds of removal have an event: of a qdisc or filter of a device (rtnetlink), and of a name in
the state directory (inotify, which a bpffs has as every file system). A link that is detached or
updated has none, nor has a bpffs that is unmounted lazily; those are looked for every two seconds.
"""

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from inotify_simple import INotify, flags

from ebpflb.node.netlink_news import tells_of
from ebpflb.readable import HasFileno, readable

log = logging.getLogger(__name__)

_WATCH_RETRY_SECONDS = 2.0  # until a folder is watched that was not there, or is another one now
_TRAFFIC_CONTROL = 1 << 3  # RTMGRP_TC
_REMOVALS = {37, 45}  # RTM_DELQDISC, RTM_DELTFILTER
_MASK = flags.DELETE | flags.MOVED_FROM | flags.DELETE_SELF | flags.UNMOUNT


class RemovalWatch:
    """Calls ``emit`` from a thread, from ``start`` to ``stop``, once for removals close together.

    Without inotify, or a folder, only the other removals are told.
    """

    def __init__(self, emit: Callable[[], None], folders: Sequence[Path]) -> None:
        self._emit, self._folders = emit, folders
        self._changes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._end = os.eventfd(0)
        self._inotify: INotify | None = None
        self._thread = threading.Thread(target=self._run, name="removals", daemon=True)

    def start(self) -> None:
        """What is removed from now on is told."""
        self._changes.bind((0, _TRAFFIC_CONTROL))
        try:
            self._inotify = INotify()
        except OSError as error:
            log.info("no inotify for the state directory: %s", error.strerror)
        self._watch_folders()
        self._thread.start()

    def stop(self) -> None:
        os.eventfd_write(self._end, 1)
        if self._thread.ident:
            self._thread.join()
        self._changes.close()
        os.close(self._end)
        if self._inotify:
            self._inotify.close()

    def _run(self) -> None:
        sources: list[int | HasFileno] = [self._changes, self._end]
        sources += [self._inotify] if self._inotify else []
        while True:
            ready = readable(sources, _WATCH_RETRY_SECONDS)
            if self._end in ready:
                return
            removed = self._changes in ready and tells_of(self._changes, _REMOVALS)
            if self._inotify in ready and self._inotify is not None:
                removed |= any(event.mask & _MASK for event in self._inotify.read(timeout=0))
            if removed:
                self._emit()
            self._watch_folders()

    def _watch_folders(self) -> None:
        """A watch belongs to the inode: one that is there already is the same again."""
        if self._inotify is None:
            return
        for folder in self._folders:
            with suppress(OSError):
                self._inotify.add_watch(folder, _MASK)
