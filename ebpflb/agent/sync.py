# SPDX-License-Identifier: Apache-2.0
"""Apply events to the state of the cluster, and write what differs to the maps.

Nothing is written before Services, EndpointSlices and the Node have been received. The programs are
attached after the first sync that wrote everything, so half-filled maps never serve: neither at a
start nor at an upgrade or a restart. A failed write is named in the status and tried again every
second; meanwhile the content of the maps keeps serving.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from ebpflb.agent.endpoint_health import set_aside_in_words
from ebpflb.agent.loop import Part, Turn
from ebpflb.agent.node_sync import NodeSync, do_all, set_up_host
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.errors import ConfigurationError, KernelError, NodeError
from ebpflb.history.records import CANARY, DEVICES, WriteCause
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node.device_watch import DevicesChanged
from ebpflb.model import annotations
from ebpflb.model.addresses import host_port
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import MAX_LISTED, Changed, Kind, ObjectEvent, Removed, Replaced
from ebpflb.model.facts import FACTS, Fact, FactRule, Observed, Values
from ebpflb.model.nodes import EachPacketRules
from ebpflb.model.services import PortName
from ebpflb.options import Options
from ebpflb.plan.desired import DesiredService
from ebpflb.stopping import parts

log = logging.getLogger(__name__)

WRITE_RETRY_SECONDS = 1.0  # between two attempts to write
MOST_IN_STATUS = 1000  # a tenant may have any number of invalid objects


def _causes(rule: FactRule, former: Values, values: Values) -> Iterator[WriteCause]:
    if rule.reason is None:
        yield WriteCause("changed", rule.label)
        return
    for what, endpoints in (("set aside", values - former), ("used again", former - values)):
        for port, place in endpoints:
            yield WriteCause(what, "endpoint", f"{port} {host_port(*place)}")


class DevicesAttached:
    """A message: devices have got programs."""


class Sync(Part):
    """``clock`` is a monotonic clock, in seconds; the times below are of it.

    ``in_sync``: nothing has failed since the last sync.
    """

    name = "sync"
    takes = (
        *(Replaced, Changed, Removed, Observed),
        *(DevicesChanged, DevicesAttached, EachPacketRules),
    )

    def __init__(
        self,
        node_sync: NodeSync,
        service_sync: ServiceSync,
        clock: Callable[[], float] = time.monotonic,
        set_up_host: Callable[[Options], str | None] = set_up_host,
    ) -> None:
        self.options: Options = node_sync.options
        self.cluster: ClusterState = service_sync.cluster
        self.node_sync, self.service_sync = node_sync, service_sync
        self._set_up_host, self._clock = set_up_host, clock
        self._fatal: Exception | None = None
        self.in_sync = False
        self.error: str | None = None
        self._last = -math.inf  # when the last sync ended
        self._ports_not_reserved: str | None = None
        self._taken = Turn()

    def take(self, message: Any) -> None:
        match message:
            case Replaced() | Changed() | Removed():
                self._take_objects(message)
            case Observed(fact):
                parts.attempt(f"observed {FACTS[fact].label}", self._observe, message)
            case DevicesChanged():
                self.node_sync.device_list = message
                self.because(DEVICES)
                self.cluster.observe(Fact.OWN_ADDRESSES, message.addresses)
                self._free_api_servers()
            case DevicesAttached():
                self._try(self.node_sync.take_attached)
            case EachPacketRules():
                self._try(partial(self.node_sync.take_each_packet, message))

    def _take_objects(self, event: ObjectEvent) -> None:
        applied = self.cluster.apply(event)
        if isinstance(event, Replaced):
            if event.kind is Kind.SERVICE:
                self.service_sync.plan_all()  # repairs any fault of the plan, hours apart
            # Later only the keys are needed; the objects would stay in memory until then.
            event = Replaced(event.kind, dict.fromkeys(event.objects), event.version)  # type: ignore[arg-type]
        if self.cluster.counts(event):
            self._taken.applied.append((event, applied))

    def _observe(self, message: Observed) -> None:
        """Take this node's own observations of endpoints and frontends."""
        former = self.cluster.observed[message.fact]
        if self.cluster.observe(*message):
            self._taken.causes += _causes(FACTS[message.fact], former, message.values)
            self._free_api_servers()

    def _free_api_servers(self) -> None:
        """Until the lists come, remove frontends by which a Service hides the API servers."""
        if not self.cluster.complete:
            self._try(self.service_sync.free_api_servers)

    def because(self, cause: WriteCause) -> None:
        self._taken.causes.append(cause)

    def take_turn(self) -> Turn:
        """Return what was taken and written since the last call."""
        taken, self._taken = self._taken, Turn()
        taken.has_new_devices = self.node_sync.take_new_devices()
        taken.node |= taken.has_new_devices
        taken.attached, taken.fatal = self.node_sync.attached, self._fatal
        taken.serves = taken.attached and self.cluster.complete
        return taken

    @property
    def has_more(self) -> bool:
        """Whether a sync is still to come."""
        return self.has_changes or bool(self.service_sync.backlog)

    @property
    def is_written(self) -> bool:
        """Whether all plans so far are in the maps."""
        return not (self.error or self.service_sync.must_start_over)

    def programs_loaded(self) -> None:
        """Note new programs: they are attached once everything has been written again."""
        self.node_sync.programs_loaded()
        self.in_sync = False

    @property
    def has_changes(self) -> bool:
        """Whether there is anything new to write; False before the needed lists are received."""
        services = bool(self.cluster.changed_services) or self._has_backlog
        changed = services or self.node_sync.changed or not self.in_sync
        return self.cluster.complete and changed

    @property
    def _has_backlog(self) -> bool:
        """Whether Services remain to be planned whose namespace may use more processor time now."""
        return self.service_sync.backlog.due <= self._clock()

    @property
    def due(self) -> float:
        """Return when to sync: the minimal sync period after the last (kube-proxy.md 16.2).

        After a failed sync, and for unfinished work, the pause is WRITE_RETRY_SECONDS.
        """
        if not self.error and self.has_changes:
            pause = 0.0 if self._has_backlog else self.options.min_sync_period
            return self._last + pause
        if self.error or self.node_sync.not_served:
            return self._last + WRITE_RETRY_SECONDS
        return self.service_sync.retry_due

    def turn(self) -> None:
        """Write the changes, and retry unfinished work.

        If a step fails the others still run; programs are attached only when all have succeeded. A
        sync without changes is not reported.
        """
        has_changes, full, begun = self.has_changes, not self.in_sync, self._clock()
        try:
            self._write(full=full)
        except KernelError as error:
            self._set_error(error)
        except (ConfigurationError, NodeError) as error:
            self._fatal = error
            return
        except Exception:
            self.in_sync = False
            raise
        else:
            self.in_sync, self.error = True, None
        self._last = self._clock()
        if has_changes or self.error:
            self._taken.seconds, self._taken.full = self._last - begun, full
            self._taken.has_failed = bool(self.error)

    def _write(self, *, full: bool) -> None:
        if full and not self.error:
            self.node_sync.check_families()
        self.node_sync.require_engine()  # before any write: what is in force keeps serving
        do_all([self._write_node, self.service_sync.write])
        self.node_sync.services_written()
        if not self.node_sync.attached:
            self._ports_not_reserved = self._set_up_host(self.options)
            self.node_sync.attach()
            self.service_sync.planner.programs_replaced()
            log.info("serving %d service ports", self.service_sync.service_ports)

    def _write_node(self) -> None:
        if self.node_sync.changed or self.node_sync.not_served or not self.in_sync:
            self.node_sync.write(self.service_sync.cover_service_cidrs())
            self._taken.node = True

    def write_canary(self, wanted: Mapping[PortName, DesiredService]) -> str | None:
        """As ServiceSync.write_canary; a failure is followed by a full sync."""
        self.because(CANARY)
        was_in_sync, self.in_sync = self.in_sync, False  # for any exception
        try:
            full = self.service_sync.write_canary(wanted)
        except KernelError as error:
            self._set_error(error)
            raise
        self.in_sync = was_in_sync
        return full

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except KernelError as error:
            self._set_error(error)

    def _set_error(self, error: KernelError) -> None:
        """Note a failed write; the next sync is a full one, and may follow in the same turn."""
        if str(error) != self.error:
            log.error("%s; trying again every %g s", error, WRITE_RETRY_SECONDS)
        self.in_sync, self.error = False, str(error)

    def ended(self) -> None:
        if cgroup_links.attached(StateDir(self.options.paths.state)):
            log.info("stopped; the loaded programs and maps keep serving")
        else:
            log.warning("stopped; no programs are pinned, so nothing serves until an agent starts")

    def status(self) -> Mapping[str, Any]:
        cluster, invalid = self.cluster, islice(self.cluster.invalid.items(), MOST_IN_STATUS)
        return {
            "lists_complete": cluster.complete,
            "invalid_objects": {f"{kind} {key}": reason for (kind, key), reason in invalid},
            "object_warnings": dict(islice(cluster.warnings(), MAX_LISTED)),
            "removed_settings": {**self.options.removed_settings, **_removed(cluster)},
            "set_aside": set_aside_in_words(cluster),
            "ports_not_reserved": self._ports_not_reserved,
            "sync_error": self.error,
            "in_sync": self.in_sync,
        }


def _removed(cluster: ClusterState) -> dict[str, str]:
    """Return the objects with a setting that was removed."""
    found = (each for each in cluster.warnings() if annotations.is_about_removed(each[1]))
    return dict(islice(found, MAX_LISTED))
