# SPDX-License-Identifier: Apache-2.0
"""Keep the maps of hand-overs up to date, and the program attached (docs/client-addresses.md).

After each turn of the loop it takes the service ports that were written, and writes to which nodes
their requests are handed (plan/handing.py). The program runs only while another node is believed.
Without --hand-over nothing of this runs.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from threading import Thread
from typing import Any

from ebpflb.agent.loop import Inbox, Part, Turn
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.errors import EbpflbError, in_words
from ebpflb.kernel.handing import BITS, Handing, HopEntry
from ebpflb.model import addresses
from ebpflb.model.addresses import Family
from ebpflb.model.facts import Fact, Observed
from ebpflb.model.hand_over import Hops
from ebpflb.model.services import PortName
from ebpflb.plan.desired import ANY
from ebpflb.plan.handing import THIS_NODE, Handed, HandingPlanner, Station

log = logging.getLogger(__name__)

ATTACHED_AGAIN = 30.0  # seconds: somebody may have removed the program, or put another before it


class HandOver(Part):
    """``hops``: returns the other nodes on the segment, None before they are known; ``make``: opens
    the maps.
    """

    name = "hand-over"

    def __init__(
        self,
        service_sync: ServiceSync,
        hops: Callable[[], Hops | None],
        make: Callable[[], Handing],
        inbox: Inbox,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``clock``: monotonic, in seconds."""
        self._services, self._read_hops, self._make = service_sync, hops, make
        self._inbox, self._clock = inbox, clock
        self._share = service_sync.node_sync.options.namespace_share
        self._handing: Handing | None = None
        self._planner: HandingPlanner | None = None
        self._compiling: Thread | None = None
        self._hops: Hops | None = None
        self._changed: set[PortName] = set()
        self._all_changed = self._leftovers = False
        self._attach_due = self._retry_due = -math.inf
        self._attached: object = None

    @property
    def due(self) -> float:
        if self._planner is None:
            return math.inf
        return max(min(self._planner.due, self._attach_due), self._retry_due)

    def turn(self) -> None:
        """Have ``observe`` called, by which everything is done."""

    def observe(self, turn: Turn) -> None:
        """Write what has changed. Raises EbpflbError; then everything is read and written again."""
        self._changed |= self._services.take_written()
        hops = self._read_hops()
        if hops is None or not turn.serves or self._clock() < self._retry_due:
            return
        try:
            self._write(hops, full=turn.full)
        except EbpflbError:
            self._planner, self._retry_due = None, self._clock() + 1.0
            raise

    def _write(self, hops: Hops, *, full: bool) -> None:
        if self._handing is None:
            self._handing = self._make()
        handing, now = self._handing, self._clock()
        if self._planner is None:
            self._planner = HandingPlanner(handing.capacity, self._share, *handing.read())
            full, self._hops = True, None
        planner = self._planner
        if hops != self._hops:
            self._take_hops(handing, hops)
            full = True
        self._all_changed |= full
        self._leftovers |= full
        if self._services.cluster.observed[Fact.HANDED_NODES] != _believed(hops):
            return
        self._put(planner)
        plan = planner.take(now)
        if plan:
            handing.write(plan)
        planner.written(self._clock())
        self._attach(handing, hops, now)

    def _take_hops(self, handing: Handing, hops: Hops) -> None:
        self._hops = hops
        handing.set_hops(_entries(hops))
        self._inbox.put(Observed(Fact.HANDED_NODES, _believed(hops)))

    def _put(self, planner: HandingPlanner) -> None:
        """Plan the service ports that were written, not those that are about to be planned again:
        what they have now may be for other hops. What a former agent has left goes after them.
        """
        wanted, backlog = self._services.planner.claims.desired, self._services.backlog
        waiting = self._services.cluster.changed_services
        for name in {*wanted} if self._all_changed else self._changed:
            desired = wanted.get(name)
            is_ours = name in planner or (desired and desired.handed_to is not None)
            if is_ours and name.owner not in backlog and name.owner not in waiting:
                planner.put(name, self._handed(name))
        self._all_changed = False
        self._changed.clear()
        if self._leftovers and not (backlog or waiting):
            planner.only([name for name in planner.names if name in wanted])
            self._leftovers = False

    def _handed(self, name: PortName) -> Handed | None:
        """Return what a service port is to have, by what it has in the maps of services."""
        desired = self._services.planner.claims.desired.get(name)
        entries = self._services.planner.actual.get(name)
        if desired is None or desired.handed_to is None or entries is None or not self._hops:
            return None
        frontends = tuple(
            frontend
            for frontend, entry in entries.services.items()
            if "external" in entry.flags and frontend.address != ANY[name.family]
            if not frontend.address.is_loopback
            if not self._services.cluster.dropping(*frontend)
        )
        by_client = any("by_client" in it.flags for it in entries.services.values())
        stations = _stations(self._hops, name.family) | {
            self._services.cluster.node_name: THIS_NODE
        }
        nodes = tuple(
            (Station(node, stations[node]), weight)
            for node, weight in sorted(desired.handed_to.items())
            if node in stations
        )
        return Handed(frontends, nodes, by_client or desired.affinity_seconds > 0)

    def _attach(self, handing: Handing, hops: Hops, now: float) -> None:
        """Attach the program, once its maps are filled; it is compiled in a thread of its own."""
        devices = {device.index: device for device in hops.uplinks}
        if devices and self._compiling is None:
            self._compiling = Thread(target=self._prepare, args=(handing,), daemon=True)
            self._compiling.start()
        if devices and self._compiling and self._compiling.is_alive():
            self._attach_due = now + 0.1
            return
        wanted = devices.keys(), handing.variant
        if wanted != self._attached or now >= self._attach_due:
            handing.attach(devices.values())
            self._attached, self._attach_due = wanted, now + ATTACHED_AGAIN

    def _prepare(self, handing: Handing) -> None:
        try:
            handing.prepare()
        except EbpflbError as error:
            log.error("requests are not handed to other nodes: %s", in_words(error))

    def ended(self) -> None:
        if self._handing:
            self._handing.close()

    def status(self) -> Mapping[str, Any]:
        return {}


def _believed(hops: Hops) -> frozenset[tuple[Family, str]]:
    return frozenset((addresses.family(it.address), it.node) for it in hops.believed)


def _stations(hops: Hops, family: Family) -> dict[str, str]:
    return {
        it.node: it.mac.hex(":") for it in hops.believed if addresses.family(it.address) == family
    }


def _entries(hops: Hops) -> dict[str, HopEntry]:
    """Return the entries of map hops: this node's own MAC addresses are in it, too."""
    nobody = ANY[Family.IPV6]
    own = {it.device.mac for it in hops.believed}
    found = {mac: HopEntry(nobody, 0, THIS_NODE, 0) for mac in own}
    found |= {mac.hex(":"): HopEntry(nobody, 0, THIS_NODE, 0) for mac in hops.macs}
    for hop in hops.believed:
        mac, bit = hop.mac.hex(":"), BITS[addresses.family(hop.address)]
        bits = bit | found[mac].families if mac in found else bit
        found[mac] = HopEntry(hop.address, hop.device.index, hop.device.mac, bits)
    return found
