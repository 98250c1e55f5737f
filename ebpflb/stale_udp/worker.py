# SPDX-License-Identifier: Apache-2.0
"""The cure for connected UDP sockets whose backend serves no more (kube-proxy.md 11.1).

The kernel talks to the backend itself, so no hook can move such a socket: it is ended, its owner
hears ECONNABORTED (EDESTADDRREQ where it sends first) and connects anew. Only sockets that we
translated are, known by their cookies. Where the kernel ends no sockets, pods' flows are taken to
another backend packet by packet (rebinding.py).

The agent says what its plans made stale, and a thread looks for it: first at the backends'
counters, which tell whether any socket may hold them, then at the map of sockets, and only where
that names stale ones at the sockets themselves. It looks twice, for a socket may have been on its
way through a hook while the plan was carried out.
"""

import logging
import threading
import time
from bisect import insort
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import reduce
from operator import attrgetter, or_
from typing import NamedTuple

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.records import Peer, PeerFrontend
from ebpflb.errors import KernelError
from ebpflb.model.addresses import Family
from ebpflb.node import sock_diag
from ebpflb.plan.stale import Stale
from ebpflb.stale_udp.find import stale_sockets
from ebpflb.stale_udp.rebind import RENEWAL
from ebpflb.stale_udp.resolve import Each, Moved, Mover

log = logging.getLogger(__name__)

MOMENT = 1.0  # seconds until the second look

OnCured = Callable[[Family, float, int], None]


class Turn(Enum):
    """Which look it is."""

    FIRST = auto()
    SECOND = auto()
    RENEWAL = auto()


class Look(NamedTuple):
    """When, at what, and whether at everything, whatever the counters say."""

    due: float
    turn: Turn
    stale: Stale
    everything: bool

    def __or__(self, later: "Look") -> "Look":
        """Both as one, when the later one is due."""
        everything = self.everything or later.everything
        return later._replace(stale=self.stale | later.stale, everything=everything)


class Cure:
    """Works from ``start`` to ``stop``.

    ``each`` does something in every network namespace, and says which is our own. ``on_cured``
    hears from the thread, for each family, how many seconds a look took and how many flows moved.
    ``supported`` says, after ``start``, whether this kernel ends sockets.
    """

    def __init__(
        self, maps: Mapping[str, Map], each: Each, on_cured: OnCured = lambda *_: None
    ) -> None:
        self.maps, self.on_cured = maps, on_cured
        self.mover = Mover(maps, each, ends=True)
        self._looks: list[Look] = []
        self._changed = threading.Condition()
        self._stopped = False
        self._orphaned = True  # there may be sockets whose service nobody serves
        self._forgone: set[tuple[Peer, PeerFrontend]] = set()  # stale, but of no connected socket
        self._thread = threading.Thread(target=self._run, name="stale", daemon=True)

    @property
    def supported(self) -> bool:
        return self.mover.ends

    def start(self) -> None:
        self.mover.ends = sock_diag.can_destroy()
        if not self.supported:
            known = "pods' flows are re-bound, the node's own stay"
            lost = known if sock_diag.can_list() else "they stay (modprobe udp_diag)"
            log.warning("this kernel ends no sockets: of stale connected UDP sockets, %s", lost)
        self._thread.start()

    def stop(self) -> None:
        """Returns when no map is in use any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.ident:
            self._thread.join()

    def ended(self, stale: Stale) -> None:
        """What plans that are carried out made stale; returns at once."""
        if stale:
            self._ask(Look(time.monotonic(), Turn.FIRST, stale, everything=False))

    def survey(self) -> None:
        """Everything may have happened, as while no agent ran; returns at once."""
        self._ask(Look(time.monotonic(), Turn.FIRST, Stale(revived=True), everything=True))

    def _ask(self, look: Look) -> None:
        with self._changed:
            insort(self._looks, look, key=attrgetter("due"))
            self._changed.notify()

    def _next(self) -> Look | None:
        """Waits until a look is due, and takes all such of its turn as one; None in the end."""
        with self._changed:
            while not self._stopped:
                now = time.monotonic()
                wait = self._looks[0].due - now if self._looks else None
                if wait is not None and wait <= 0:
                    return self._take(self._looks[0].turn, now)
                self._changed.wait(wait)
        return None

    def _take(self, turn: Turn, now: float) -> Look:
        due = [look for look in self._looks if look.turn is turn and look.due <= now]
        self._looks = [look for look in self._looks if look.turn is not turn or look.due > now]
        return reduce(or_, due)

    def _run(self) -> None:
        while look := self._next():
            begun = time.monotonic()
            try:
                self._report(look, self._look(look), time.monotonic() - begun)
            except (KernelError, OSError) as error:
                log.warning("stale UDP flows cannot be moved: %s", error)
            except Exception:
                log.exception("looking for stale UDP flows failed")
            self._look_again(look)

    def _look_again(self, look: Look) -> None:
        if look.turn is Turn.FIRST:
            self._ask(look._replace(due=look.due + MOMENT, turn=Turn.SECOND))
        pending = any(other.turn is Turn.RENEWAL for other in self._looks)
        if self.mover.rebinding.bound and not pending:
            due = time.monotonic() + RENEWAL
            self._ask(Look(due, Turn.RENEWAL, Stale(), everything=True))

    def _look(self, look: Look) -> Moved:
        moved = self.mover.end_lost() if look.stale.revived else Moved()
        if self._is_affected(look):
            moved += self._search(look.turn)
        return moved

    def _is_affected(self, look: Look) -> bool:
        """Whether there can be stale sockets at all."""
        stale = look.stale
        self._orphaned |= any(map(self._is_held, stale.orphaned))
        return (
            look.everything
            or (stale.revived and self._orphaned)
            or any(map(self._is_held, stale.ended))
        )

    def _is_held(self, backend: int) -> bool:
        opened, closed = self.maps["backend_stats"].get(backend)
        return opened != closed or backend in self.mover.rebinding.bound

    def _search(self, turn: Turn) -> Moved:
        """What was sought in vain twice is not sought again."""
        stale, self._orphaned = stale_sockets(self.maps)
        pairs = set(stale.items())
        moved, left = self.mover.move(dict(pairs - self._forgone))
        self._forgone &= pairs
        if turn is not Turn.FIRST:
            self._forgone |= left.items()
        log.debug("%d stale UDP sockets are not connected, or hidden from us", len(left))
        return moved

    def _report(self, look: Look, moved: Moved, seconds: float) -> None:
        if moved:
            how = "ended" if self.supported else "re-bound"
            log.info("%d connected UDP sockets %s: their backends have gone", moved.total(), how)
        for family in Family if look.turn is Turn.FIRST else moved:
            self.on_cured(family, seconds, moved[family])
