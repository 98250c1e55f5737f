# SPDX-License-Identifier: Apache-2.0
"""Which engine translates new flows, as long as the agent runs.

Whether pods are on a bridge is known only when the first pod exists, so the engine is decided
again when devices change, and once per sync period. A reason for another engine counts after it
has lasted for SETTLE_SECONDS, because a CNI sets up a port step by step. The engine changes at
most once per sync period. Open flows continue with the engine that opened them.
"""

import logging
import math
import time
from collections.abc import Callable, Collection
from typing import NamedTuple

from ebpflb.agent.netfilter_sync import NetfilterSync
from ebpflb.entries.services import Flags
from ebpflb.errors import KernelError, NodeError
from ebpflb.kernel.netfilter.flowtable import FlowtableSync, flowtable_obstacle
from ebpflb.kernel.netfilter.probe import can_translate_sctp, netfilter_obstacle
from ebpflb.kernel.node.sysctls import bridge_calls
from ebpflb.model import packet_path
from ebpflb.model.addresses import Network
from ebpflb.model.devices import Devices
from ebpflb.model.nodes import why_off
from ebpflb.model.packet_path import OFF, Engine, PacketMark, PacketPath
from ebpflb.options import Options

log = logging.getLogger(__name__)

SETTLE_SECONDS = 5.0


class EngineChoice:
    """``path`` is the current engine, and why; None before the first ``update``.

    ``due``: when ``update`` may change the engine, for a reason that has not lasted long enough
    yet; infinity if there is none.
    """

    def __init__(
        self,
        wanted: str,
        *,
        missing: str | None,
        netfilter: NetfilterSync,
        mark: PacketMark = OFF,
        patterns: tuple[str, ...] = (),
        period: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wanted`` is one of PACKET_PATHS; ``missing`` as in ``packet_path.decide``.

        ``mark``: of --packet-mark. ``patterns``: of --devices. ``period``: minimum seconds between
        two changes of the engine. Raises NodeError if the wanted engine cannot work.
        """
        self._wanted, self._missing, self._mark = wanted, missing, mark
        self._netfilter, self._period, self._clock = netfilter, period, clock
        self._patterns = patterns
        self._changed = -math.inf  # last change of the engine
        self.path: PacketPath | None = None
        self.due = math.inf
        packet_path.decide(wanted, missing=missing)

    @property
    def flags(self) -> Flags:
        """The engine's flags in map settings."""
        return self._netfilter.flags if self.is_netfilter else frozenset()

    @property
    def is_netfilter(self) -> bool:
        return self.path is not None and self.path.engine is Engine.NETFILTER

    def update(self, devices: Devices, pods: Collection[Network]) -> bool:
        """Decide by the node's current state; return whether the engine differs from the last one.

        When this returns netfilter, the table of netfilter is ready. Raises KernelError if
        --packet-path=netfilter cannot work now.
        """
        unsuited = _unmarked(self._mark) or packet_path.unsuited(
            devices, pods, bridge_calls(), self._patterns
        )
        path = packet_path.decide(self._wanted, missing=self._missing, unsuited=unsuited)
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
        """Whether the engine may change now; otherwise ``due`` says when."""
        now = self._clock()
        if self.due == math.inf:
            self.due = max(now + SETTLE_SECONDS, self._changed + self._period)
        return now >= self.due

    def _prepared(self, path: PacketPath) -> PacketPath:
        """Return the path, or the flow tables if the nftables table cannot be made.

        Raises KernelError if netfilter is demanded.
        """
        try:
            self._netfilter.start()
        except NodeError as error:
            if self._wanted == Engine.NETFILTER:
                what = "--packet-path=netfilter cannot work now"
                raise KernelError(what, 0, str(error)) from error
            return PacketPath(Engine.FLOWS, str(error))
        return path


def _unmarked(mark: PacketMark) -> str | None:
    """Return the reason against netfilter: a FORWARD chain may accept only the mark."""
    if mark == OFF:
        return None
    return f"only the flow tables set the mark {mark} of --packet-mark"


class Probed(NamedTuple):
    """``missing``: why the netfilter engine cannot work on this node; None if it works."""

    missing: str | None
    sctp: bool = False  # whether the kernel's NAT translates SCTP


def probe_netfilter(options: Options) -> Probed:
    """Try the netfilter engine, unless only the flow tables are wanted: a test would load modules.

    Raises NodeError.
    """
    if options.packet_path == Engine.FLOWS:
        return Probed("not probed, because the flow tables were chosen")
    missing = netfilter_obstacle()
    return Probed(missing, sctp=not missing and can_translate_sctp())


def flowtable_of(options: Options, missing: str | None) -> FlowtableSync:
    """Return the keeper of the flowtable, for --fast-forward; ``missing`` as in EngineChoice."""
    is_wanted = options.has_flowtable and not missing and not options.shadow
    lacking = flowtable_obstacle() if is_wanted else None
    if lacking:
        log.warning("--fast-forward has no effect with netfilter: %s", lacking)
    off = why_off(options.fast_forward, None)
    return FlowtableSync(is_wanted=is_wanted, missing=lacking, off=off)
