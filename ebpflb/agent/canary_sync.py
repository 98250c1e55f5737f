# SPDX-License-Identifier: Apache-2.0
"""The canary: service ports in the maps for a check by `ebpflb doctor`, while it needs them.

Doctor connects through these service ports to an endpoint of its own. That tests the attached
programs and the maps that they read. The canary stays for some seconds after each request, so if
doctor is killed it soon disappears; when the agent ends, it or the next agent withdraws the canary.
The agent uses the same service ports for its own frames (UplinkCanary, below). If a map is full
there is no canary.
"""

import logging
import math
import secrets
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs

from ebpflb.agent.inspection import answer, error
from ebpflb.agent.loop import Inbox, Part, Turn
from ebpflb.agent.node_sync import NodeSync
from ebpflb.agent.sync import Sync
from ebpflb.entries.services import Frontend
from ebpflb.errors import EbpflbError, KernelError, in_words
from ebpflb.files import DOCS
from ebpflb.kernel.netfilter.probe import Arrival, arrivals
from ebpflb.kernel.netlink import Subscription
from ebpflb.model.devices import Addresses, Device
from ebpflb.plan.canary import CANARY_PROTOCOLS, CanaryLease, is_canary, service_ports
from ebpflb.plan.desired import ANY
from ebpflb.serve.listener import NOT_FOUND, Request, Response
from ebpflb.workers import DescriptorWorker

LEASE_SECONDS = 10.0


class CanaryRefused(EbpflbError):
    """The reason why there is no canary now."""


class CanarySync(Part):
    """Keeps the canary; called by the agent's loop. ``clock`` is a monotonic clock, in seconds."""

    name = "canary"
    due = math.inf  # when the canary is withdrawn

    def __init__(self, sync: Sync, clock: Callable[[], float] = time.monotonic) -> None:
        self._options, self._cluster = sync.options, sync.cluster
        self._node_sync, self._service_sync = sync.node_sync, sync.service_sync
        self._write, self._clock = sync.write_canary, clock
        self._id, self._nodeport = "", 0
        self._id_of_frames = ""

    @property
    def _is_there(self) -> bool:
        return bool(self._id) and self._service_sync.has_canary

    def hold(self, nodeport: int) -> CanaryLease:
        """Keep the canary in the maps for LEASE_SECONDS from now on; a ``nodeport`` of 0 means any.

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

    turn = ended = withdraw

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


# The canary at each uplink: requests that are not translated there, although a program chose a
# backend.
#
# A filter or program of others behind ours can send packets past netfilter, or change the field
# that carries the choice (skb->priority). Nothing else of the agent would notice. So frames are put
# into the ingress of each of the node's own devices (kernel/netfilter/probe.py): at the start,
# after a change of the device, of its qdiscs or of its filters, for `ebpflb doctor`, and repeatedly
# while something is wrong. Programs that others attach by tcx are noticed by doctor alone: the
# kernel does not report them.

log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.5  # after a change of filters, which is often several
AGAIN_SECONDS = 10.0  # while something is wrong, or nothing can be probed
_TRAFFIC_CONTROL = 4  # RTNLGRP_TC
_CHANGES = {36, 37, 44, 45}  # RTM_NEWQDISC, _DELQDISC, _NEWTFILTER, _DELTFILTER
_INDEX = struct.Struct("=4xI")  # of struct tcmsg

Uplinks = Mapping[Device, Addresses]


class UplinkCanary(DescriptorWorker, Part):
    """``lost``: device -> what becomes of its requests; written by the loop."""

    name = "uplinks"

    def __init__(
        self,
        inbox: Inbox,
        canary: CanarySync,
        node_sync: NodeSync,
        probe: Callable[[Uplinks], Mapping[str, Arrival]] = arrivals,
    ) -> None:
        super().__init__(self.name)
        self.lost: Mapping[str, str] = {}
        self._ask, self._canary, self._node_sync, self._probe = inbox.ask, canary, node_sync, probe
        self._uplinks: Uplinks = {}
        self._probe_at = math.inf
        self._one_probe = threading.Lock()
        self._changes = Subscription(_TRAFFIC_CONTROL)

    def observe(self, turn: Turn) -> None:
        """Probe the node's devices soon if they differ from the last ones."""
        if turn.node and (uplinks := self._node_sync.uplinks) != self._uplinks:
            self._uplinks, self._probe_at = uplinks, time.monotonic()
            self.wake()

    def status(self) -> Mapping[str, Any]:
        return {"choices_lost": self.lost if self._node_sync.engine.is_netfilter else {}}

    def respond(self, request: Request) -> Response:
        """Answer doctor: /v1/canary/hold?nodeport=, /v1/canary/end or /v1/canary/uplinks.

        ``hold`` writes the canary or keeps it for some seconds more, ``uplinks`` probes each now.
        Raises TimeoutError, and ValueError for an invalid request.
        """
        try:
            match request.path:
                case "/v1/canary/hold":
                    nodeport = _nodeport(request.query)
                    return answer(self._ask(lambda: self._canary.hold(nodeport)))
                case "/v1/canary/end":
                    self._ask(self._canary.withdraw)
                    return answer(CanaryLease(""))
                case "/v1/canary/uplinks":
                    return answer(self.report())
        except CanaryRefused as refused:
            return error(409, str(refused))
        except EbpflbError as failed:
            return error(503, str(failed))
        return NOT_FOUND

    def report(self) -> Mapping[str, Arrival]:
        """Probe now; return the result by device.

        Raises CanaryRefused, NodeError, KernelError or TimeoutError.
        """
        with self._one_probe:
            if not (uplinks := self._ask(self._canary.begin_frames)):
                return {}
            found: Mapping[str, Arrival] | None = None
            try:
                found = self._probe(uplinks)
            finally:
                is_valid = self._ask(lambda: self._take_found(found))
        if not is_valid:
            raise CanaryRefused("the agent has withdrawn the canary meanwhile: try again")
        return found

    def stop(self) -> None:
        super().stop()
        self._changes.close()

    def run(self) -> None:
        while not self.stopped.is_set():
            wait = max(self._probe_at - time.monotonic(), 0.0)
            if self.wait([self._changes], wait) and self._concern_uplinks():
                self._probe_at = min(self._probe_at, time.monotonic() + SETTLE_SECONDS)
            if time.monotonic() >= self._probe_at and not self.stopped.is_set():
                self._turn()

    def _concern_uplinks(self) -> bool:
        """Whether the messages are about filters of an uplink, or some were lost (ENOBUFS)."""
        taken = self._changes.take()
        about = {_INDEX.unpack_from(it)[0] for kind, it in taken or () if kind in _CHANGES}
        return taken is None or any(device.index in about for device in self._uplinks)

    def _turn(self) -> None:
        self._probe_at = again = time.monotonic() + AGAIN_SECONDS
        try:
            self.report()
        except (EbpflbError, OSError) as failed:
            log.debug("uplinks are not probed: %s", in_words(failed))
            return
        if not self.lost and self._probe_at == again:
            self._probe_at = math.inf

    def _take_found(self, found: Mapping[str, Arrival] | None) -> bool:
        """End the frames; return whether the results are valid. Called by the loop."""
        if not self._canary.end_frames() or found is None:
            return False
        lost = {name: str(arrival) for name, arrival in found.items() if arrival.is_loss}
        for name in lost.keys() - self.lost.keys():
            log.error("device %s: %s: see %s/runbook.md, choices lost", name, lost[name], DOCS)
        for name in self.lost.keys() - lost.keys():
            log.warning("device %s: requests are translated again", name)
        self.lost = lost
        return True


def _nodeport(query: str) -> int:
    """Raises ValueError."""
    nodeport = int(parse_qs(query).get("nodeport", ["0"])[0])
    if not 0 < nodeport < 1 << 16:
        raise ValueError("nodeport has to be a port")
    return nodeport
