# SPDX-License-Identifier: Apache-2.0
"""Ask the datapath about a socket's call, and about a packet through the devices."""

import errno
import socket

from msgspec import Struct

from ebpflb.entries.flows import Connection, Ends, FlowState
from ebpflb.entries.services import Chosen, Frontend, Range, ServiceEntry, id_of
from ebpflb.errors import KernelError, NodeError, one_line
from ebpflb.kernel import recording
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.node import routes
from ebpflb.kernel.node.routes import Route
from ebpflb.kernel.recording import Answer, Handled, RecordingPrograms, SocketQuestion
from ebpflb.model.addresses import Address, host_port
from ebpflb.model.services import Protocol
from ebpflb.tools.explain.asking import NODE_CLIENT, Client, MapFacts
from ebpflb.tools.explain.words import Row, Words

_OVER = {FlowState.CLOSED, FlowState.RESET}  # the next SYN opens another connection
_TYPES = {Protocol.TCP: 1, Protocol.UDP: 2, Protocol.SCTP: 1}  # SOCK_STREAM, SOCK_DGRAM


class Way(Struct):
    """The steps so far; ``noted`` has the steps of the program that decided."""

    rows: list[Row] = []
    noted: Words | None = None
    answer: Answer | None = None
    errno: int = 0
    ends: Ends | None = None  # of the packet when it leaves, or arrives here
    is_masqueraded: bool = False  # the packet arrives with an address of this node as its source
    went: str = ""  # "", "dropped", "refused", "handed" (to another node)

    @property
    def service(self) -> ServiceEntry | None:
        """The service that the program has found."""
        return self.noted.service if self.noted else None

    def say(self, step: str, says: str) -> None:
        self.rows.append(Row(step, says))


def call(recorder: RecordingPrograms, facts: MapFacts, asked: Frontend, client: Client) -> Way:
    """Follow connect() to this frontend; ``way.answer`` tells whether packets follow."""
    protocol, way = Protocol(asked.protocol), Way()
    question = SocketQuestion(asked, _TYPES[protocol], client.netns)
    way.say("hook", f"connect{asked.address.version} at the cgroup of {client}")
    way.answer, found = recorder.call(question)
    way.noted = Words(facts, asked, client, found, is_packet=False)
    way.rows += way.noted.rows
    way.errno = next((step.value for step in found if step.kind == "errno"), 0)
    last = found[-1]
    if way.answer is Answer.REWRITE:
        to = host_port(last.address, recording.port_of(last.value))
        way.say("connect", f"to {to} instead; getpeername() says {asked}")
    elif way.answer is Answer.DENY:
        way.say("connect", f"fails with {errno.errorcode.get(way.errno, 'EPERM')}")
    return way


class PacketWay:
    """The path of a packet, in the node's network namespace."""

    def __init__(
        self,
        recorder: RecordingPrograms,
        facts: MapFacts,
        asked: Frontend,
        client: Client,
        port: int,
    ) -> None:
        """Prepare the packet. Raises NodeError for a client without an address."""
        if client.address is None:
            raise NodeError(f"{client} has no IPv{asked.address.version} address to send from")
        self.recorder, self.facts, self.asked, self.client = recorder, facts, asked, client
        self.protocol = Protocol(asked.protocol)
        self.first = Ends(client.address, asked.address, port, asked.port)
        self.way = Way()

    def go(self) -> Way:
        """Follow the whole path. Raises KernelError, NodeError or OSError."""
        if self.client.kind == NODE_CLIENT:
            self._from_node()
        else:
            self._from_device()
        return self.way

    def _from_node(self) -> None:
        route = routes.route_to(self.asked.address)
        if not self._routed(route):
            return
        if route.local:
            self.way.say("route", "for this node itself: no device's hook sees it")
            return
        sent = recording.request_frame(self.first, self.protocol)
        self._decided(self._handle("egress", sent, route, 0))

    def _from_device(self) -> None:
        came = routes.route_to(self.first.source)
        if not came.ifindex or came.local:
            why = came.why or "it is this node's own"
            raise NodeError(f"no device leads to the client {self.first.source}: {why}")
        sent = recording.request_frame(self.first, self.protocol)
        if self._handed_over(sent, came):
            return
        handled = self._handle("ingress", sent, came, 0)
        if not self._decided(handled):
            return
        ends = self._translated(handled)
        if ends != self.first:
            to = host_port(ends.destination, ends.destination_port)
            self.way.say("DNAT", f"destination {to}")
        out = routes.route_to(ends.destination, self.first.source, came.ifindex, handled.mark)
        if self._routed(out):
            self._leave(handled, ends, came, out)

    def _handed_over(self, packet: bytes, came: Route) -> bool:
        if came.ifindex not in self.facts.hands_over:
            return False
        if (found := self.recorder.hand_over(packet, came.ifindex)) is None:
            return False
        mac, hop = found
        self.way.say("hook", f"ingress of {_device(came)}")
        self.way.say("hand-over", f"to the node {hop.address} by its MAC address {mac}")
        self.way.went = "handed"
        return True

    def _leave(self, handled: Handled, ends: Ends, came: Route, out: Route) -> None:
        """Follow the packet after routing; it passes egress unless it is for this node."""
        chosen = next((step.value for step in handled.steps if step.kind == "chosen"), 0)
        if out.local:
            self.way.say("route", "for a process of this node itself")
        else:
            via = f", via {out.gateway}" if out.gateway else ""
            self.way.say("route", f"by {_device(out)}{via}")
            if (left := self._egress(ends, came, out, handled.frame)) is None:
                return
            ends = left
        self.way.ends = ends
        # Neither engine masquerades packets to a process of this node.
        marked = chosen & Chosen.MASQUERADE and not out.local
        self.way.is_masqueraded = bool(marked) or ends.source != self.first.source

    def _egress(self, ends: Ends, came: Route, out: Route, packet: bytes) -> Ends | None:
        """Return the packet's addresses and ports as it leaves the node; None if it is dropped."""
        if recording.ends_of(packet) != ends:
            packet = recording.request_frame(ends, self.protocol)
        try:
            handled = self._handle("egress", packet, out, came.ifindex)
        except KernelError as error:
            if error.errno != errno.EINVAL:
                raise
            if ends == self.first:  # before 5.15 the packet would count as the node's own
                return ends
            handled = self.recorder.handle("egress", packet, ifindex=out.ifindex)
        if not self._decided(handled, is_first=False):
            return None
        left = recording.ends_of(handled.frame)
        if left != ends:
            self.way.say("SNAT", f"leaves as {host_port(left.source, left.source_port)}, at random")
        return left

    def _handle(self, hook: str, packet: bytes, route: Route, came_by: int) -> Handled:
        device = _device(route)
        if route.ifindex not in self.facts.devices:
            self.way.say("hook", f"none: no program is attached to {device}")
            return Handled("pass", packet, 0, [])
        if hook == "egress" and {"netfilter", "attaching"} <= self.facts.settings.flags:
            self.way.say("hook", f"none at egress of {device}: netfilter needs none")
            return Handled("pass", packet, 0, [])
        self.way.say("hook", f"{hook} of {device}")
        return self.recorder.handle(hook, packet, ifindex=route.ifindex, came_by=came_by)

    def _decided(self, handled: Handled, *, is_first: bool = True) -> bool:
        """Return whether the packet goes on; note what the first or last hook decided."""
        noted = Words(self.facts, self.asked, self.client, handled.steps, is_packet=True)
        self.way.rows += noted.rows
        refused = "refused" if noted.verdict == "refused" else ""
        self.way.went = "dropped" if handled.action == "drop" else refused
        if is_first or self.way.went:
            self.way.noted = noted
        return not self.way.went

    def _translated(self, handled: Handled) -> Ends:
        """Return the packet's addresses and ports after the hook and netfilter's PREROUTING."""
        chosen = next((it for it in handled.steps if it.kind == "chosen"), None)
        if known := self._known():
            to = host_port(known.reply.source, known.reply.source_port)
            said = f"conntrack has this connection ({known.state_name}): it stays with {to}"
            self.way.say("flow", said)
            if noted := self.way.noted:
                noted.verdict, noted.only = "established", self._backend_at(noted, known)
            return self._to(known.reply.source, known.reply.source_port)
        backend = self.facts.backend(id_of(chosen.value)) if chosen else None
        if chosen is None or backend is None:
            return recording.ends_of(handled.frame)
        return self._to(backend.address, backend.port)

    def _known(self) -> Connection | None:
        """Return the client's open connection in conntrack, if netfilter translates it."""
        found = conntrack.find([(self.protocol, self.first)])
        is_open = (it for it in found if it.is_translated and it.state not in _OVER)
        return next(is_open, None)

    def _backend_at(self, noted: Words, known: Connection) -> int | None:
        """Return the id of the connection's endpoint; None if it has left the service."""
        block = noted.service.block if noted.service else Range(0, 0)
        endpoint = known.reply.source, known.reply.source_port
        listed = map(self.facts.slot, range(block.base, block.base + block.size))
        return next((it.id for it in listed if it and (it.address, it.port) == endpoint), None)

    def _to(self, address: Address, port: int) -> Ends:
        return Ends(self.first.source, address, self.first.source_port, port)

    def _routed(self, route: Route) -> bool:
        if route.ifindex or route.local:
            return True
        self.way.say("route", f"none: {one_line(route.why)}")
        self.way.went = "dropped"
        return False


def _device(route: Route) -> str:
    try:
        return one_line(route.device or socket.if_indextoname(route.ifindex))
    except OSError:
        return f"device {route.ifindex}"
