# SPDX-License-Identifier: Apache-2.0
"""Keep the maps of hand-overs up to date, and the program attached (docs/client-addresses.md).

After each turn of the loop it takes the service ports that were written, and writes to which nodes
their requests are handed (plan/handing.py). The program also answers the tests of other nodes.
Without --hand-over nothing of this runs.
"""

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from typing import Any

from ebpflb.agent.loop import Inbox, Part, Turn
from ebpflb.agent.service_sync import Backlog, Budget, ServiceSync, Step
from ebpflb.cluster.event_recorder import object_limit
from ebpflb.errors import EbpflbError
from ebpflb.kernel.handing import BITS, Handing, HopEntry, Loaded
from ebpflb.model import addresses
from ebpflb.model.addresses import Address, Family
from ebpflb.model.devices import own_addresses
from ebpflb.model.events import MAX_LISTED, Key
from ebpflb.model.facts import Fact, Observed, Values
from ebpflb.model.hand_over import Hops, Hosts
from ebpflb.model.services import PortName
from ebpflb.plan.desired import ANY
from ebpflb.plan.handing import THIS_NODE, Handed, HandingPlanner, Station

log = logging.getLogger(__name__)

NOTING_SECONDS = 10.0  # in which a Service's open connections are noted before it is handed over
PUTTING_COST = 1000  # of a turn, in units of 10 µs: a tenant may have many tables
LEFT_SECONDS = 60.0  # that what a former agent has left waits for tenants with endless changes
SOON = 0.1  # seconds: a thread is at work
_NO_SPACE = "no space left to hand over requests to %s: they are served without it"
_PAST = "{}: its requests are not handed over, past this rule"
ATTACHED_AGAIN = 30.0  # seconds: somebody may have removed the program, or put another before it


Run = Callable[[Callable[[], Any]], Future[Any]]


class HandOver(Part):
    """``hops``: returns the other nodes on the segment, None before they are known; ``make``: opens
    the maps. ``dropped``: of service ports the addresses that rules drop, with a sentence.
    """

    name = "hand-over"

    def __init__(
        self,
        service_sync: ServiceSync,
        hops: Callable[[], Hops | None],
        make: Callable[[], Handing],
        inbox: Inbox,
        clock: Callable[[], float] = time.monotonic,
        run: Run | None = None,
    ) -> None:
        """``clock``: monotonic, in seconds. ``run``: in a thread, one after the other."""
        self._services, self._read_hops, self._make = service_sync, hops, make
        self._inbox, self._clock = inbox, clock
        self.dropped: dict[PortName, dict[str, str]] = {}
        self._share = service_sync.node_sync.options.namespace_share
        self._handing: Handing | None = None
        self._planner: HandingPlanner | None = None
        self._pool = ThreadPoolExecutor(1, "hand-over")
        self._run: Run = run or self._pool.submit
        self._loading: Future[Loaded] | None = None
        self._reading: Future[HandingPlanner] | None = None
        self._hops: Hops | None = None
        self._own: frozenset[Address] = frozenset()  # this node's addresses
        self._hosts = Hosts(())  # read with each change of the other nodes
        self._stations: dict[tuple[Family, str], str] = {}  # MAC addresses of nodes
        self._awaited: Values | None = None  # what the Services are not yet planned by
        self._changed: dict[Key, set[PortName]] = {}  # by Service
        self._backlog = Backlog(self._putting, Budget(clock), PUTTING_COST)  # of these Services
        self._all_changed = False
        self._left_until = math.inf  # when they go at the latest
        self._waits = True  # for another turn of the loop
        self._noting: dict[PortName, float] = {}  # until when; the first one ends first
        self._may_warn = object_limit(clock).allows
        self._attach_due = self._retry_due = self._load_due = -math.inf
        self._attached: object = None

    @property
    def due(self) -> float:
        """When the loop calls ``observe`` at the latest, by which everything is done."""
        if self._waits:
            return math.inf
        if self._planner is None:
            return self._retry_due
        noting = next(iter(self._noting.values()), math.inf)
        due = min(self._planner.due, self._attach_due, self._backlog.due, noting)
        return max(due, self._retry_due)

    def observe(self, turn: Turn) -> None:
        """Write what has changed. Raises EbpflbError; then everything is read and written again."""
        self._note(self._services.take_written())
        if turn.node:
            former, here = self._own, self._services.node_sync.device_list.addresses
            self._own = own_addresses(here)
            self._all_changed |= self._own != former
        hops = self._read_hops()
        self._waits = hops is None or not turn.serves
        if hops is None or self._waits or self._clock() < self._retry_due:
            return
        try:
            self._write(hops, full=turn.full)
        except EbpflbError:
            self._planner, self._retry_due = None, self._clock() + 1.0
            raise

    def _note(self, names: Collection[PortName]) -> None:
        for name in names:
            self._changed.setdefault(name.owner, set()).add(name)
        self._backlog.add({name.owner for name in names})

    def _write(self, hops: Hops, *, full: bool) -> None:
        if self._handing is None:
            self._handing = self._make()
        handing, now = self._handing, self._clock()
        if self._planner is None:
            if self._reading is None:
                self._reading = self._run(partial(_planner, handing, self._share))
            if not self._reading.done():
                self._retry_due = now + SOON
                return
            reading, self._reading = self._reading, None
            self._planner = reading.result()
            full, self._hops = True, None
            self.dropped.clear()
        planner = self._planner
        if hops != self._hops:
            self._take_hops(handing, hops)
            full = True
        self._all_changed |= full
        if full:
            known = self._services.cluster.claims.nodes.values()
            self._hosts = Hosts(chain.from_iterable((*it.addresses, *it.pods) for it in known))
            self._left_until = min(self._left_until, now + LEFT_SECONDS)
        if self._awaited not in (None, self._services.cluster.observed[Fact.HANDED_NODES]):
            return
        self._awaited = None
        if now >= self._attach_due:
            self._note(planner.lacking)  # there may be room by now
        self._put(planner)
        plan = planner.take(now)
        if plan:
            handing.write(plan)
        planner.written(self._clock())
        self._attach(handing, hops, now)

    def _take_hops(self, handing: Handing, hops: Hops) -> None:
        self._hops = hops
        self._stations = {
            (addresses.family(it.address), it.node): it.mac.hex(":") for it in hops.believed
        }
        self._awaited = frozenset(self._stations)
        self._stations |= {(it, self._services.cluster.node_name): THIS_NODE for it in Family}
        handing.set_hops(_entries(hops))
        self._inbox.put(Observed(Fact.HANDED_NODES, self._awaited))

    def _put(self, planner: HandingPlanner) -> None:
        """Plan the service ports that were written; what a former agent has left goes after them,
        or after LEFT_SECONDS, because a tenant may change Services without end.
        """
        wanted, now = self._services.planner.claims.desired, self._clock()
        if self._all_changed:
            self._note([it for it in wanted if it in planner or wanted[it].handed_to is not None])
        self._all_changed = False
        while self._noting and self._noting[name := next(iter(self._noting))] <= now:
            del self._noting[name]
            self._note([name])
        self._backlog.take_slice(now)
        self._backlog.spent(self._clock() - now)
        waiting = self._backlog or self._services.backlog or self._services.cluster.changed_services
        if self._left_until < math.inf and (not waiting or now >= self._left_until):
            planner.only(wanted)
            self._left_until = math.inf

    def _putting(self, service: Key) -> Iterator[Step]:
        """Plan the service ports of a Service, a port in each step.

        Not those that are about to be planned again: what they have may be for other hops.
        """
        for name in self._changed.pop(service, ()):
            begun, planner = self._clock(), self._planner
            desired = self._services.planner.claims.desired.get(name)
            is_ours = name in self.dropped or (desired and desired.handed_to is not None)
            is_next = service in self._services.backlog
            is_next = is_next or service in self._services.cluster.changed_services
            if planner and not is_next and (is_ours or name in planner):
                did_lack = name in planner.lacking
                planner.put(name, self._noted(planner, name, self._handed(name), begun))
                if name in planner.lacking and not did_lack and self._may_warn(name.namespace):
                    log.warning(_NO_SPACE, name)
            yield Step(1 + int((self._clock() - begun) * 1e5))

    def _noted(
        self, planner: HandingPlanner, name: PortName, handed: Handed | None, now: float
    ) -> Handed | None:
        """Return it without nodes while what this node has masqueraded so far is being noted.

        With policy Local nothing is masqueraded.
        """
        if handed is None:
            self._noting.pop(name, None)
            return None
        ports = self._services.cluster.services.get(name.owner, ())
        is_local = any(port.external_local for port in ports[:1])
        if not (is_local or name in planner or planner.hands_over(handed.frontends)):
            self._noting.pop(name, None)
            self._noting[name] = now + NOTING_SECONDS
        return handed._replace(nodes=()) if name in self._noting else handed

    def _handed(self, name: PortName) -> Handed | None:
        """Return the frontends and nodes of a service port, by its entries in the service maps.

        Addresses of this node and of other hosts are left out (model/hand_over.py).
        """
        self.dropped.pop(name, None)
        desired = self._services.planner.claims.desired.get(name)
        entries = self._services.planner.actual.get(name)
        if desired is None or desired.handed_to is None or entries is None:
            return None
        external = [
            frontend
            for frontend, entry in entries.services.items()
            if "external" in entry.flags and frontend.address != ANY[name.family]
            if not frontend.address.is_loopback
            if frontend.address not in self._own and frontend.address not in self._hosts
        ]
        find = self._services.cluster.drop_rules.find
        rules = {it: found.rule for it in external if (found := find(*it))}
        if rules:
            some = islice(rules.items(), MAX_LISTED)
            self.dropped[name] = {str(it.address): _PAST.format(rule) for it, rule in some}
        frontends = tuple(it for it in external if it not in rules)
        if not frontends:
            return None
        by_client = any("by_client" in it.flags for it in entries.services.values())
        nodes = tuple(
            (Station(node, mac), weight)
            for node, weight in sorted(desired.handed_to.items())
            if (mac := self._stations.get((name.family, node)))
        )
        return Handed(frontends, nodes, by_client or desired.affinity_seconds > 0)

    def _attach(self, handing: Handing, hops: Hops, now: float) -> None:
        """Attach the program, once its maps are filled; a thread compiles and loads it."""
        devices = {device.index: device for device in hops.uplinks}
        if devices and not handing.is_loaded and not self._is_loaded(handing, now):
            self._attach_due = now + SOON
            return
        wanted = devices.keys(), handing.variant
        if wanted != self._attached or now >= self._attach_due:
            handing.attach(devices.values())
            self._attached, self._attach_due = wanted, now + ATTACHED_AGAIN

    def _is_loaded(self, handing: Handing, now: float) -> bool:
        """Whether a thread has loaded the program; starts one. Raises what loading has raised."""
        if self._loading is None and now >= self._load_due:
            self._load_due = now + ATTACHED_AGAIN  # if it fails
            self._loading = self._run(handing.load)
        if self._loading is None or not self._loading.done():
            return False
        loading, self._loading = self._loading, None
        handing.use(loading.result())
        self._load_due = -math.inf
        return handing.is_loaded

    def ended(self) -> None:
        self._pool.shutdown()
        if self._handing:
            self._handing.close()


def _planner(handing: Handing, share: float) -> HandingPlanner:
    """Begin with what the maps have; takes some 0.7 s of processor time if they are full."""
    return HandingPlanner(handing.room, share, *handing.read())


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
