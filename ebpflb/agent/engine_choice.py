# SPDX-License-Identifier: Apache-2.0
"""Which engine translates new flows, as long as the agent runs.

Whether pods are on a bridge is known only when the first pod is there, so the choice is made again
when devices change, and once per sync period. A reason for another engine counts once it has
lasted for SETTLE_SECONDS: a CNI sets up a port step by step. The engine changes at most once per
sync period. Flows that are open go on, whichever engine opened them.
"""

import logging
import math
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from ebpflb.agent.netfilter_sync import NetfilterSync
from ebpflb.errors import NodeError
from ebpflb.model import bridged_pods, packet_path
from ebpflb.model.addresses import Network
from ebpflb.model.devices import Devices
from ebpflb.model.packet_mark import OFF, PacketMark
from ebpflb.model.packet_path import Engine, PacketPath
from ebpflb.node.bridge_calls import bridge_calls
from ebpflb.node.flowtable_probe import flowtable_obstacle
from ebpflb.node.flowtable_sync import FlowtableSync
from ebpflb.node.netfilter_probe import can_translate_sctp, netfilter_obstacle
from ebpflb.options import Options
from ebpflb.plan.entries import Flags

log = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0


class EngineChoice:
    """``path`` is the current engine, and why; None before the first ``update``.

    ``due``: when ``update`` may change the engine for a reason that has not lasted long enough yet,
    by the clock; infinity if there is none.
    """

    def __init__(
        self,
        chosen: str,
        *,
        missing: str | None,
        netfilter: NetfilterSync,
        mark: PacketMark = OFF,
        patterns: tuple[str, ...] = (),
        period: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``chosen`` is one of packet_path.CHOICES; ``missing`` as in ``packet_path.decide``.

        ``mark``: of --packet-mark. ``patterns``: of --devices. ``period``: seconds from one change
        of the engine to the next. Raises NodeError if what was chosen cannot work.
        """
        self._chosen, self._missing, self._mark = chosen, missing, mark
        self._netfilter, self._period, self._clock = netfilter, period, clock
        self._patterns = patterns
        self._changed = -math.inf  # when the engine changed last
        self.path: PacketPath | None = None
        self.due = math.inf
        packet_path.decide(chosen, missing=missing)

    @property
    def flags(self) -> Flags:
        """Of the map settings."""
        return self._netfilter.flags if self.is_netfilter else frozenset()

    @property
    def is_netfilter(self) -> bool:
        return self.path is not None and self.path.engine is Engine.NETFILTER

    def update(self, devices: Devices, pods: Collection[Network]) -> bool:
        """Chooses by what is on the node now; returns whether the choice differs from the last one.

        What netfilter needs is there when this returns it.
        """
        unsuited = _unmarked(self._mark) or bridged_pods.unsuited(
            devices, pods, bridge_calls(), self._patterns
        )
        path = packet_path.decide(self._chosen, missing=self._missing, unsuited=unsuited)
        if self.path and path.engine is not self.path.engine and not self._is_settled():
            return False
        self.due = math.inf
        if path.engine is Engine.NETFILTER and not self.is_netfilter:
            path = self._prepared(path)
        changed = path != self.path
        if changed:
            log.info("packet path: %s (%s)", path.engine, path.reason)
        if self.path is None or path.engine is not self.path.engine:
            self._changed = self._clock()
        self.path = path
        if not self.is_netfilter:
            self._netfilter.end()
        return changed

    def _is_settled(self) -> bool:
        """Whether the engine may change now; else ``due`` says when."""
        now = self._clock()
        if self.due == math.inf:
            self.due = max(now + SETTLE_SECONDS, self._changed + self._period)
        return now >= self.due

    def _prepared(self, path: PacketPath) -> PacketPath:
        """The same, or the flow tables if the table of nftables cannot be made."""
        try:
            self._netfilter.start()
        except NodeError as error:
            if self._chosen == Engine.NETFILTER:
                log.error("--packet-path=netfilter cannot work now: %s", error)
            return PacketPath(Engine.FLOWS, str(error))
        return path


def _unmarked(mark: PacketMark) -> str | None:
    """A FORWARD chain that accepts only the mark would drop what netfilter translates."""
    if mark == OFF:
        return None
    return f"only the flow tables set the mark {mark} of --packet-mark"


class Probed(NamedTuple):
    """``missing``: why the engine netfilter cannot work on this node; None where it works."""

    missing: str | None
    sctp: bool = False  # whether the kernel's NAT translates it


def probe_netfilter(options: Options) -> Probed:
    """Where the flow tables were chosen nothing is tried: that would load modules into the kernel.

    Raises NodeError.
    """
    if options.packet_path == Engine.FLOWS:
        return Probed("not tried, because the flow tables were chosen")
    missing = netfilter_obstacle()
    return Probed(missing, sctp=not missing and can_translate_sctp())


def flowtable_of(options: Options, missing: str | None) -> FlowtableSync:
    """What keeps the flowtable, where --fast-forward was chosen; ``missing`` as in EngineChoice."""
    chosen = options.fast_forward and not missing and not options.shadow
    lacking = flowtable_obstacle() if chosen else None
    if lacking:
        log.warning("--fast-forward has no effect with netfilter: %s", lacking)
    return FlowtableSync(chosen=chosen, missing=lacking)
