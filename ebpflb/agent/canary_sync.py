# SPDX-License-Identifier: Apache-2.0
"""The canary: service ports in the maps for a check by `ebpflb doctor`, while it needs them.

Doctor connects through these service ports to an endpoint of its own. That tests the attached
programs and the maps that they read. Doctor takes a lease of some seconds and renews it, so if it
is killed the canary soon disappears; when the agent ends, it or the next agent withdraws the
canary. The canary takes no space that a Service could need: if a map is nearly full doctor is
refused.
"""

import math
import secrets
import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from ebpflb.agent.inspection import Call, Inspection, answer, error
from ebpflb.agent.node_sync import NodeSync
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.entries.services import Frontend
from ebpflb.errors import EbpflbError, KernelError
from ebpflb.model.addresses import Address, family
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.devices import Addresses, Device
from ebpflb.model.events import AuditAnswer
from ebpflb.model.services import PortName
from ebpflb.options import Options
from ebpflb.plan.canary import (
    Canary,
    CanaryLease,
    UplinkReport,
    frame_ports,
    service_ports,
    unused_cluster_ip,
)
from ebpflb.plan.desired import ANY, DesiredService
from ebpflb.serve.listener import NOT_FOUND, Handler, Request, Response

LEASE_SECONDS = 10.0
MOST_FILLED = 0.9  # of a map

CanaryPorts = Mapping[PortName, DesiredService]
_NONE: CanaryPorts = {}


class CanaryRefused(EbpflbError):
    """The reason why there is no canary now."""


class CanaryWish(NamedTuple):
    """Doctor's request: per family its client, its endpoint, and the node's admitted address."""

    addresses: tuple[tuple[Address, Address, Address], ...]
    port: int
    nodeport: int


class CanarySync:
    """Keeps the canary; called by the agent's loop. ``clock`` is a monotonic clock, in seconds."""

    def __init__(
        self,
        options: Options,
        cluster: ClusterState,
        node_sync: NodeSync,
        service_sync: ServiceSync,
        write: Callable[[CanaryPorts], str | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``write``: like ServiceSync.write_canary."""
        self._options, self._cluster, self._node_sync = options, cluster, node_sync
        self._service_sync, self._write, self._clock = service_sync, write, clock
        self._id = ""
        self._doctors, self._frames = _NONE, _NONE
        self.due = math.inf  # when the canary is withdrawn

    def begin(self, wish: CanaryWish) -> CanaryLease:
        """Write the canary into the maps. Raises CanaryRefused, or KernelError."""
        self._check(wish)
        made = [it for each in wish.addresses if (it := self._canary(wish, *each))]
        if not made:
            raise CanaryRefused(
                "no unused cluster IP is known: there is neither a ServiceCIDR nor enough "
                "cluster IPs"
            )
        self._put({k: v for each in made for k, v in service_ports(each).items()})
        self._id = secrets.token_hex(8)
        addresses = [str(each.cluster_ip) for each in made]
        lease = CanaryLease(self._id, addresses, ",".join(self._options.devices))
        self.renew(self._id)
        return lease

    def renew(self, lease: str) -> None:
        """Renew the lease. Raises CanaryRefused if it has ended."""
        if not self._id or lease != self._id or not self._service_sync.has_canary:
            raise CanaryRefused("the agent has withdrawn the canary meanwhile: try again")
        self.due = self._clock() + LEASE_SECONDS

    def end(self, lease: str) -> None:
        """End the lease. Raises KernelError."""
        if self._id and lease == self._id:
            self._end()

    def withdraw(self) -> None:
        """Withdraw the canary. Raises nothing: a failed write is repeated with all others."""
        try:
            self._end()
        except KernelError:
            return

    def _end(self) -> None:
        self._id, self.due = "", math.inf
        if self._doctors or self._frames:
            self._put(_NONE)

    def begin_frames(self) -> dict[Device, Addresses]:
        """Write the frontends for frames; return the devices to probe, with addresses.

        None with the flow tables, which translate at the device. Raises CanaryRefused, or
        KernelError.
        """
        self._check_written()
        if not self._node_sync.engine.is_netfilter:
            return {}
        self._put(self._doctors, frame_ports())
        return self._node_sync.uplinks

    def end_frames(self) -> bool:
        """Withdraw the frontends for frames; return whether they were there until now.

        Raises KernelError.
        """
        were_there = bool(self._frames) and self._service_sync.has_canary
        if self._frames:
            self._put(self._doctors)
        return were_there

    def _put(self, doctors: CanaryPorts, frames: CanaryPorts = _NONE) -> None:
        """Have these service ports in the maps, or none if they do not fit.

        Raises CanaryRefused, or KernelError.
        """
        self._doctors, self._frames = doctors, frames
        if not self._service_sync.complete:  # the next write starts over, without a canary
            return
        if full := self._write({**doctors, **frames}):
            self._doctors = self._frames = _NONE
            raise CanaryRefused(full)

    def _check_written(self) -> None:
        """Raises CanaryRefused."""
        if self._options.shadow:
            raise CanaryRefused("the agent runs with --shadow: no connection is translated")
        if not (
            self._cluster.complete and self._service_sync.complete and self._node_sync.attached
        ):
            raise CanaryRefused("the agent has not written all Services yet: see `ebpflb status`")
        self._check_space()

    def _check(self, wish: CanaryWish) -> None:
        """Check whether doctor's canary is possible. Raises CanaryRefused."""
        if not self._options.served.is_all:
            raise CanaryRefused(
                "the agent serves some Services only (--namespaces, --services): an address that"
                " is unused here may be one that kube-proxy serves"
            )
        self._check_written()
        if self._id:
            raise CanaryRefused(
                "another `ebpflb doctor` is using the canary: try again when it has ended"
            )
        if self._has_nodeport(wish.nodeport):
            raise CanaryRefused(f"port {wish.nodeport} is a NodePort of a Service: try again")

    def _check_space(self) -> None:
        planner = self._service_sync.planner
        capacity, used = planner.capacity, planner.used_entries()
        for name, most in (
            ("services", capacity.services),
            ("slots", capacity.slots),
            ("service_stats", capacity.service_ids),
            ("backend_slots", capacity.backend_ids),
            ("source_ranges", capacity.source_ranges),
        ):
            if used[name] > MOST_FILLED * most:
                raise CanaryRefused(f"map {name} is nearly full ({used[name]} of {most} entries)")

    def _has_nodeport(self, port: int) -> bool:
        places = (Frontend(ip, port, it) for ip in ANY.values() for it in (6, 17))
        return any(map(self._service_sync.planner.holder, places))

    def _canary(
        self, wish: CanaryWish, client: Address, endpoint: Address, node: Address
    ) -> Canary | None:
        planner, of = self._service_sync.planner, family(client)
        self._service_sync.cover_service_cidrs()
        cluster_ips = [it for it in planner.cluster_ips.counts if it.version == of]
        taken = {each.address for each in planner.frontends.owners} | set(cluster_ips)
        taken |= self._node_sync.device_list.addresses
        covering = planner.cluster_ips.prefixes.networks.get(of)
        ranges = self._cluster.service_cidrs
        found = unused_cluster_ip(ranges, covering, cluster_ips, taken, secrets.randbelow)
        return Canary(found, client, endpoint, node, wish.port, wish.nodeport) if found else None


# The requests of `ebpflb doctor` about the canary, over the local socket; the loop executes them.
#
# /v1/canary/begin?client=&endpoint=&node=&port=&nodeport=   the first three once for each family
# /v1/canary/renew?id=
# /v1/canary/end?id=
# /v1/canary/uplinks                 probes each uplink now (agent/uplink_canary.py)

_PORTS = range(1, 1 << 16)

_Query = dict[str, list[str]]
_Do = Callable[[CanarySync], CanaryLease]


class CanaryRequests:
    """A handler of the local socket, before ``others``; ``put`` belongs to the inbox."""

    def __init__(
        self,
        put: Callable[[Call[CanaryLease]], None],
        uplinks: Callable[[], UplinkReport],
        others: Handler,
    ) -> None:
        self._put, self._uplinks, self._others = put, uplinks, others

    def respond(self, request: Request) -> Response:
        begins, _, what = request.path.rpartition("/")
        if begins != "/v1/canary":
            return self._others(request)
        known = {"begin": _begin, "renew": _renew, "end": _end}
        if what not in known and what != "uplinks":
            return NOT_FOUND
        try:
            if what == "uplinks":
                return answer(self._uplinks())
            return answer(self._carried_out(known[what](parse_qs(request.query))))
        except TimeoutError:
            return error(503, "the agent is busy or starting")
        except ValueError as wrong:
            return error(400, str(wrong))
        except CanaryRefused as refused:
            return error(409, str(refused))
        except EbpflbError as failed:
            return error(503, str(failed))

    def _carried_out(self, do: _Do) -> CanaryLease:
        call = Call(lambda cluster, planner, canary: do(canary))
        self._put(call)
        return call.result()


def local_pages(
    put: Callable[[Any], None],
    uplinks: Callable[[], UplinkReport],
    audit: Callable[[], AuditAnswer],
) -> Handler:
    """Return the handler of the local socket; ``put`` belongs to the inbox."""
    return CanaryRequests(put, uplinks, Inspection(put, audit).respond).respond


def _begin(query: _Query) -> _Do:
    named = [list(map(ip_address, query.get(it, ()))) for it in ("client", "endpoint", "node")]
    addresses = tuple(zip(*named, strict=True))
    if any(len({it.version for it in each}) > 1 for each in addresses):
        raise ValueError("client, endpoint and node are of different families")
    port, nodeport = (int(query.get(it, ["0"])[0]) for it in ("port", "nodeport"))
    if port not in _PORTS or nodeport not in _PORTS or not addresses:
        raise ValueError("client, endpoint, node, port and nodeport are needed")
    wish = CanaryWish(addresses, port, nodeport)
    return lambda canary: canary.begin(wish)


def _renew(query: _Query) -> _Do:
    lease = _id(query)

    def renew(canary: CanarySync) -> CanaryLease:
        canary.renew(lease)
        return CanaryLease(lease, [])

    return renew


def _end(query: _Query) -> _Do:
    lease = _id(query)

    def end(canary: CanarySync) -> CanaryLease:
        canary.end(lease)
        return CanaryLease(lease, [])

    return end


def _id(query: _Query) -> str:
    return query.get("id", [""])[0]
