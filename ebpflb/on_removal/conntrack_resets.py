# SPDX-License-Identifier: Apache-2.0
"""Connections of the kernel's conntrack that are translated: of its engine, and of a kube-proxy.

conntrack tells no numbers of TCP, and the removal of an entry resets nothing. So a flow is written
that leads to the frontend itself, marked as gone: the datapath looks flows up before conntrack, and
answers the client by resets. Both ends are asked for their numbers. conntrack's entry goes with the
last pass: by then it has translated what the two have answered.
"""

import time
from collections.abc import Iterable, Iterator

from ebpflb.datapath.maps.sweep import Gate
from ebpflb.errors import NodeError
from ebpflb.model import on_removal
from ebpflb.model.services import Protocol
from ebpflb.node import ctnetlink
from ebpflb.on_removal.flow_resets import GONE_FLAG
from ebpflb.on_removal.gone_connections import ResetCounts, WantedConnections
from ebpflb.on_removal.raw_segments import Sender, question
from ebpflb.plan.connections import Connection
from ebpflb.plan.entries import Frontend
from ebpflb.plan.flow_entries import Flow, FlowKind, Hook, Tuple
from ebpflb.plan.watched_ports import Endpoint
from ebpflb.stale_udp.lookups import Maps

_FLAGS = GONE_FLAG | {"request", "seen"}
_OVER = {"last-ack", "time-wait", "close", "none"}
_OPENING = {"syn-sent", "syn-sent2"}


class ConntrackConnections:
    """Of the network namespace of the thread that calls."""

    kind = on_removal.BY_CONNTRACK

    def __init__(self, maps: Maps) -> None:
        self._flows, self._gate = maps["tcp_flows"], Gate(maps)

    def found(self, wanted: WantedConnections) -> Iterable[tuple[Frontend, Endpoint]]:
        return {_through(each) for each in self._search(wanted)}

    def reset(self, wanted: WantedConnections, *, is_last: bool) -> ResetCounts:
        counts, over = ResetCounts(), list[Connection]()
        with Sender() as sender:
            for each in list(self._search(wanted)):
                if each.state_name in _OPENING:  # the client's next SYN gets another endpoint
                    over.append(each)
                    continue
                counts[_through(each)] += self._mark(each)
                to_client, to_backend = each.original.reversed(), each.reply.reversed()
                sender.send(to_client, [question(to_client)])
                sender.send(to_backend, [question(to_backend)])
                over += [each] if is_last else []
        ctnetlink.delete(over)
        return +counts

    def _search(self, wanted: WantedConnections) -> Iterator[Connection]:
        ports = wanted.ports
        try:
            listed = ctnetlink.connections(lambda _, __, port: port in ports, Protocol.TCP)
            for each in listed:
                if each.state_name not in _OVER and wanted.has(*_through(each)):
                    yield each
        except NodeError as error:
            raise OSError(str(error)) from error

    def _mark(self, each: Connection) -> bool:
        """False where it is marked already."""
        key = Tuple(*each.original, Protocol.TCP, Hook.INGRESS)
        now = time.monotonic_ns()
        flow = Flow(
            created=now,
            connection=0,
            address=each.original.destination,
            port=each.original.destination_port,
            other_port=each.original.source_port,
            service=0,
            backend=0,
            ifindex=0,
            kind=FlowKind.DNAT,
            flags=_FLAGS,
            last_seen=now,
        )
        self._gate.open()
        return self._flows.insert(key, flow)


def _through(each: Connection) -> tuple[Frontend, Endpoint]:
    frontend = Frontend(each.original.destination, each.original.destination_port, each.protocol)
    return frontend, (each.reply.source, each.reply.source_port)
