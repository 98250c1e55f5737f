# SPDX-License-Identifier: Apache-2.0
"""Connections of the flow tables: the request's entry is marked, and both ends are reset.

From then on the datapath answers what the client sends by resets. The segments that the agent makes
are those of the packets between the hooks, so that netfilter finds them in their connection, and
the device's egress translates them as any other of the flow.
"""

from collections.abc import Iterable, Iterator

from ebpflb.datapath.maps.layout import MAPS, ffi
from ebpflb.model import on_removal
from ebpflb.on_removal.gone_connections import ResetCounts, WantedConnections
from ebpflb.on_removal.raw_segments import Sender, question, reset
from ebpflb.plan.connections import Ends
from ebpflb.plan.entries import Frontend
from ebpflb.plan.flow_entries import Flow, FlowKind, Hook, Tuple, between_hooks, reverse
from ebpflb.plan.watched_ports import Endpoint
from ebpflb.stale_udp.lookups import Maps

GONE_FLAG = frozenset({"gone"})

_PORT = slice(*(ffi.offsetof("struct tuple", "destination_port") + n for n in (0, 2)))
_HOOK = ffi.offsetof("struct tuple", "hook")
_KIND = ffi.offsetof("struct flow", "kind")
assert MAPS["tcp_flows"].key_size == ffi.sizeof("struct tuple"), "keys are read by these offsets"


class FlowConnections:
    """Of the map of TCP's flows."""

    kind = on_removal.BY_FLOWS

    def __init__(self, maps: Maps) -> None:
        self._flows = maps["tcp_flows"]

    def found(self, wanted: WantedConnections) -> Iterable[tuple[Frontend, Endpoint]]:
        return {_through(*each) for each in self._search(wanted) if not each[1].flags & GONE_FLAG}

    def reset(self, wanted: WantedConnections, *, is_last: bool) -> ResetCounts:
        counts = ResetCounts()
        with Sender() as sender:
            for key, flow in list(self._search(wanted)):
                marked = flow if flow.flags & GONE_FLAG else self._mark(key, flow)
                if marked is None or "rst" in marked.flags:
                    continue
                counts[_through(key, flow)] += not flow.flags & GONE_FLAG
                self._send(sender, key, marked)
        return +counts

    def _search(self, wanted: WantedConnections) -> Iterator[tuple[Tuple, Flow]]:
        """The entries of requests."""
        ports = {port.to_bytes(2, "big") for port in wanted.ports}
        for key, value in self._flows.packed_items():
            is_request = key[_HOOK] == Hook.INGRESS and value[_KIND] == FlowKind.DNAT
            if is_request and key[_PORT] in ports:
                at, flow = self._flows.key.unpack(key), self._flows.value.unpack(value)
                if wanted.has(*_through(at, flow)):
                    yield at, flow

    def _mark(self, key: Tuple, former: Flow) -> Flow | None:
        """None where it is another flow by now, which is left as it is."""
        flow: Flow | None = self._flows.pop(key)
        if flow is None:
            return None
        is_same = flow.created == former.created
        marked = flow._replace(flags=flow.flags | GONE_FLAG) if is_same else flow
        return marked if self._flows.insert(key, marked) and is_same else None

    def _send(self, sender: Sender, key: Tuple, request: Flow) -> None:
        inside = between_hooks(key, request)
        reply: Flow | None = self._flows.get(reverse(inside))
        to_backend = Ends(*inside[:4])
        end, acknowledged = (reply.end, reply.acknowledged) if reply else (0, 0)
        numbers = {request.acknowledged, end}
        sender.send(to_backend.reversed(), _ending(to_backend.reversed(), numbers, request.end))
        if end:  # else the endpoint has never answered
            sender.send(to_backend, _ending(to_backend, {acknowledged, request.end}, end))


def _ending(ends: Ends, numbers: set[int], acknowledgment: int) -> Iterator[bytes]:
    """Of the numbers one is awaited; of another in the window the receiver asks again, and has its
    answer of the datapath. Where none is known it is asked for.
    """
    known = numbers - {0}
    for number in known or {0}:
        yield reset(ends, number, acknowledgment)
    if not known:
        yield question(ends)


def _through(key: Tuple, flow: Flow) -> tuple[Frontend, Endpoint]:
    frontend = Frontend(key.destination, key.destination_port, key.protocol)
    return frontend, (flow.address, flow.port)
