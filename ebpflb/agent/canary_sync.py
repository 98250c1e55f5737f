# SPDX-License-Identifier: Apache-2.0
"""The canary: service ports in the maps for a check by `ebpflb doctor`, while it needs them.

Doctor connects through these service ports to an endpoint of its own. That tests the attached
programs and the maps that they read. The canary stays for some seconds after each request, so if
doctor is killed it soon disappears; when the agent ends, it or the next agent withdraws the canary.
The agent uses the same service ports for its own frames (agent/uplink_canary.py). The canary takes
no space that a Service could need: if a map is nearly full it is refused.
"""

import math
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from ebpflb.agent.inspection import Call, Inspection, answer, error
from ebpflb.agent.node_sync import NodeSync
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.entries.services import Frontend
from ebpflb.errors import EbpflbError, KernelError
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.devices import Addresses, Device
from ebpflb.model.events import AuditAnswer
from ebpflb.model.services import PortName
from ebpflb.options import Options
from ebpflb.plan.canary import CANARY_PROTOCOLS, CanaryLease, UplinkReport, is_canary, service_ports
from ebpflb.plan.desired import ANY, DesiredService
from ebpflb.serve.listener import Handler, Request, Response

LEASE_SECONDS = 10.0
MOST_FILLED = 0.9  # of a map

CanaryPorts = Mapping[PortName, DesiredService]


class CanaryRefused(EbpflbError):
    """The reason why there is no canary now."""


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
        self._id, self._nodeport = "", 0
        self._id_of_frames = ""
        self.due = math.inf  # when the canary is withdrawn

    @property
    def _is_there(self) -> bool:
        return bool(self._id) and self._service_sync.has_canary

    def hold(self, nodeport: int) -> CanaryLease:
        """Have the canary in the maps for LEASE_SECONDS from now on; a ``nodeport`` of 0 means any.

        Raises CanaryRefused, or KernelError.
        """
        if not self._is_there or nodeport not in (0, self._nodeport):
            self._replace(nodeport)
        self.due = self._clock() + LEASE_SECONDS
        return CanaryLease(self._id, ",".join(self._options.devices))

    def withdraw(self) -> None:
        """Withdraw the canary. Raises nothing: a failed write is repeated with all others."""
        was_there, self._id, self.due = self._is_there, "", math.inf
        # An incomplete sync starts over, without a canary.
        if was_there and self._service_sync.complete:
            with suppress(KernelError):
                self._write({})

    def begin_frames(self) -> dict[Device, Addresses]:
        """Write the canary for frames; return the devices to probe, with addresses.

        None with the flow tables, which translate at the device. Raises CanaryRefused, or
        KernelError.
        """
        self._check_written()
        if not self._node_sync.engine.is_netfilter:
            return {}
        self._id_of_frames = self.hold(0).id
        return self._node_sync.uplinks

    def end_frames(self) -> bool:
        """Withdraw the canary unless doctor uses it; return whether it was there until now."""
        was_there = self._is_there and self._id == self._id_of_frames
        if not self._nodeport:
            self.withdraw()
        return was_there

    def _replace(self, nodeport: int) -> None:
        """Write the canary. Raises CanaryRefused, or KernelError."""
        self._check_written()
        if nodeport:
            self._check_nodeport(nodeport)
        self._id, self._nodeport = "", nodeport
        if full := self._write(service_ports(nodeport)):
            raise CanaryRefused(full)
        self._id = secrets.token_hex(8)

    def _check_written(self) -> None:
        """Raises CanaryRefused."""
        if self._options.shadow:
            raise CanaryRefused("the agent runs with --shadow: no connection is translated")
        if not (
            self._cluster.complete and self._service_sync.complete and self._node_sync.attached
        ):
            raise CanaryRefused("the agent has not written all Services yet: see `ebpflb status`")
        self._check_space()

    def _check_nodeport(self, nodeport: int) -> None:
        """Check whether doctor may have this NodePort. Raises CanaryRefused."""
        if not self._options.served.is_all:
            raise CanaryRefused(
                "the agent serves some Services only (--namespaces, --services): a NodePort that"
                " is unused here may be one that kube-proxy serves"
            )
        wanted = (Frontend(ip, nodeport, it) for ip in ANY.values() for it in CANARY_PROTOCOLS)
        holders = filter(None, map(self._service_sync.planner.holder, wanted))
        if not all(map(is_canary, holders)):
            raise CanaryRefused(f"port {nodeport} is a NodePort of a Service: try again")

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


# The requests of `ebpflb doctor` about the canary, over the local socket; the loop executes them.
#
# /v1/canary/hold?nodeport=          writes the canary, or keeps it for some seconds more
# /v1/canary/end
# /v1/canary/uplinks                 probes each uplink now (agent/uplink_canary.py)


def local_pages(
    put: Callable[[Any], None],
    uplinks: Callable[[], UplinkReport],
    audit: Callable[[], AuditAnswer],
) -> Handler:
    """Return the handler of the local socket; ``put`` belongs to the inbox."""
    return CanaryRequests(put, uplinks, Inspection(put, audit).respond).respond


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
        try:
            match request.path:
                case "/v1/canary/hold":
                    return answer(self._hold(_nodeport(request.query)))
                case "/v1/canary/end":
                    return answer(self._end())
                case "/v1/canary/uplinks":
                    return answer(self._uplinks())
        except TimeoutError:
            return error(503, "the agent is busy or starting")
        except ValueError as wrong:
            return error(400, str(wrong))
        except CanaryRefused as refused:
            return error(409, str(refused))
        except EbpflbError as failed:
            return error(503, str(failed))
        return self._others(request)

    def _hold(self, nodeport: int) -> CanaryLease:
        return self._call(lambda canary: canary.hold(nodeport))

    def _end(self) -> CanaryLease:
        def end(canary: CanarySync) -> CanaryLease:
            canary.withdraw()
            return CanaryLease("")

        return self._call(end)

    def _call(self, do: Callable[[CanarySync], CanaryLease]) -> CanaryLease:
        call = Call(lambda cluster, planner, canary: do(canary))
        self._put(call)
        return call.result()


def _nodeport(query: str) -> int:
    """Raises ValueError."""
    nodeport = int(parse_qs(query).get("nodeport", ["0"])[0])
    if not 0 < nodeport < 1 << 16:
        raise ValueError("nodeport has to be a port")
    return nodeport
