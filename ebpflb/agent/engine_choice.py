# SPDX-License-Identifier: Apache-2.0
"""Which engine opens flows, as long as the agent runs, and what the conntrack engine needs for it.

Whether pods are on a bridge is known only when the first pod is there, so the choice is made anew
when devices change, and once per sync period. Flows that are open are followed whichever it is.
"""

import logging
from collections.abc import Collection

from ebpflb.datapath import conntrack_probe
from ebpflb.datapath.programs import kfuncs
from ebpflb.errors import NodeError
from ebpflb.model import bridged_pods, packet_path
from ebpflb.model.addresses import Network
from ebpflb.model.devices import Devices
from ebpflb.model.packet_mark import OFF, PacketMark
from ebpflb.model.packet_path import Engine, PacketPath
from ebpflb.node import nat
from ebpflb.node.bridge_calls import bridge_calls
from ebpflb.node.flowtable_probe import flowtable_obstacle
from ebpflb.node.flowtable_sync import FlowtableSync
from ebpflb.options import Options

log = logging.getLogger(__name__)


class EngineChoice:
    """``path`` is the engine in force, and why; None before the first ``update``.

    ``missing`` says why conntrack cannot be used by the programs, whichever engine was chosen.
    """

    def __init__(self, chosen: str, *, missing: str | None, mark: PacketMark = OFF) -> None:
        """``chosen`` is one of packet_path.CHOICES; ``missing`` as in ``packet_path.decide``.

        ``mark`` is what rules of the node may wait for. Raises NodeError if what was chosen cannot
        work.
        """
        self._chosen, self.missing, self._mark = chosen, missing, mark
        self.path: PacketPath | None = None
        packet_path.decide(chosen, missing=missing)

    @property
    def is_conntrack(self) -> bool:
        return self.path is not None and self.path.engine is Engine.CONNTRACK

    def update(self, devices: Devices, pods: Collection[Network]) -> bool:
        """Chooses by what is on the node now; whether it differs from the choice before.

        What the conntrack engine needs is there when this returns it.
        """
        unsuited = _unmarked(self._mark) or bridged_pods.unsuited(devices, pods, bridge_calls())
        path = packet_path.decide(self._chosen, missing=self.missing, unsuited=unsuited)
        if path.engine is Engine.CONNTRACK and not self.is_conntrack:
            path = self._prepared(path)
        changed = path != self.path
        if changed:
            log.info("packet path: %s (%s)", path.engine, path.reason)
        self.path = path
        return changed

    def _prepared(self, path: PacketPath) -> PacketPath:
        """The same, or the flow tables if conntrack and NAT cannot be kept at work.

        From now on NatWatch looks after the table.
        """
        try:
            nat.keep_nat_hooks(nat.ENGINE)
        except NodeError as error:
            return PacketPath(Engine.FLOWS, str(error))
        return path


def _unmarked(mark: PacketMark) -> str | None:
    """A FORWARD chain that accepts only the mark would drop what conntrack translates."""
    if mark == OFF:
        return None
    return f"only the flow tables set the mark {mark} of --packet-mark"


def conntrack_obstacle(options: Options) -> str | None:
    """Why the conntrack engine cannot work on this node; None where it works.

    If the flow tables were chosen, conntrack is not loaded into the kernel to find that out.
    """
    if options.packet_path == Engine.FLOWS and not kfuncs.are_loaded():
        return "conntrack is not loaded"
    return conntrack_probe.obstacle(options.paths.cache) or nat.missing()


def flowtable_of(options: Options, missing: str | None) -> FlowtableSync:
    """What keeps the flowtable, where --fast-forward was chosen; ``missing`` as in EngineChoice."""
    chosen = options.fast_forward and not missing and not options.shadow
    lacking = flowtable_obstacle() if chosen else None
    if lacking:
        log.warning("--fast-forward has no effect on the conntrack engine: %s", lacking)
    return FlowtableSync(chosen=chosen, missing=lacking)
