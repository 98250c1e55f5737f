# SPDX-License-Identifier: Apache-2.0
"""Ask the datapath about a socket's call, and about a packet through the devices.

Each step of its programs becomes a row: a question and its result.
"""

import errno
import socket
import time
from datetime import datetime
from typing import Any, NamedTuple

from msgspec import Struct

from ebpflb.entries.flows import Connection, Ends, FlowKind, FlowState
from ebpflb.entries.services import Chosen, Frontend, Range, ServiceEntry, frontend_kind, id_of
from ebpflb.errors import KernelError, NodeError, one_line
from ebpflb.kernel import recording
from ebpflb.kernel.maps.layout import VERDICTS, address_from
from ebpflb.kernel.maps.records import AffinityKey
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.node import routes
from ebpflb.kernel.node.routes import Route
from ebpflb.kernel.recording import Answer, Handled, RecordingPrograms, SocketQuestion, Step
from ebpflb.model.addresses import Address, host_port
from ebpflb.model.annotations import LEAST_CONNECTIONS, MAGLEV, RANDOM, ROUND_ROBIN, SOURCE_HASH
from ebpflb.model.services import Protocol
from ebpflb.plan.tables import scheduler_of
from ebpflb.tools.explain.asking import NODE_CLIENT, Client, MapFacts

# Kind of step, or KIND=VALUE -> "QUESTION: RESULT"; ``it`` is the Words at this step.
SENTENCES = {
    "foreign": "socket: {it.protocol} sockets are left alone: their packets are translated instead",
    "left_to_packets": "socket: pods' packets are translated instead of their sockets, by "
    "--socket-translation=host or while kube-ipvs0 is there",
    "service": "frontend: {it.frontend_kind} of {it.service_name}",
    "address_use=0": "frontend: no frontend, and no address of a service",
    "address_use=1": "frontend: a service has this address, but not this port",
    "address_use=2": "frontend: no service has this address, which is in a service range",
    "client_unknown": "ranges: the service has source ranges and a pod's socket has no address "
    "yet: its packets decide",
    "admission=0": "ranges: source ranges do not admit {step.address}",
    "admission=1": "ranges: source ranges admit {step.address}",
    "assigned": "socket: the socket keeps {it.endpoint}",
    "policy": "policy: {it.policy}",
    "affinity_none": "affinity: {it.timeout}: no endpoint is remembered",
    "affinity_expired": "affinity: {it.timeout}: {it.endpoint} has expired",
    "affinity_gone": "affinity: {it.timeout}: {it.endpoint} is no longer available",
    "affinity_used": "affinity: remembers {it.endpoint}{it.until}",
    "slot": "endpoint: {it.how}: {it.picked}",
    "node_local": "endpoint: the listener on this node, while it answers: {it.picked}",
    "untracked": "rules: rules in raw exempt its packets from conntrack (NOTRACK): ebpflb leaves "
    "them alone",
    "passthrough": "failover: no endpoint for this client here: its packets go on to the router "
    "(externalFailoverPolicy Passthrough)",
    "unknown_port=0": "address: a load balancer's address, but no service has this port "
    "(--load-balancer-unknown-ports)",
    "unknown_port=1": "address: a load balancer's address, but no service has this port, and the "
    "route leads back to where the packet came from (--load-balancer-unknown-ports)",
    "flow": "flow: has an entry of kind {it.flow}",
    "flow_replaced": "flow: the packet starts a new flow that replaces this one",
    "attaching": "attach: a device may have no program at egress: the flow tables open no flow yet",
    "snat=hairpin": "SNAT: needed: the client is the endpoint itself",
    "snat=all": "SNAT: needed: --masquerade-all",
    "snat=not_pod": "SNAT: needed: a client that is not a pod asks for a cluster IP",
    "snat=local_client": "SNAT: needed: a pod asks for an external address",
    "snat=elsewhere": "SNAT: needed: the endpoint is on another node, so replies must come back "
    "through this node",
    "snat=here": "SNAT: needed: --masquerade-local-backends, though the endpoint is here",
    "snat=asymmetric": "SNAT: needed: replies would leave by another device",
    "chosen": "DNAT: netfilter translates to {it.chosen}",
    "opened=0": "DNAT: a flow is opened",
    "opened=1": "DNAT: a flow is opened, from another port",
    "opened=2": "DNAT: no free port",
    "opened=3": "DNAT: full",
    "source=by_route": "SNAT: source {step.address}, as the kernel's route says",
    "source=by_devices": "SNAT: source {step.address}, the address of the device",
    "reply_device": "reply: leaves where the request came in, past the routes (--reply-path)",
}
# Steps without a row: their results are in other rows, or in the verdict.
WITHOUT_ROW = {"affinity_asked", "affinity_remembered", "answer", "direct", "errno", "verdict"}
_VALUES = {"snat": recording.MASQUERADES, "source": recording.STEP_SOURCES}  # by their names in C
_HOW = {
    ROUND_ROBIN: "the next in turn (round-robin)",
    LEAST_CONNECTIONS: "the one with fewer connections of two drawn at random (least-connections)",
    SOURCE_HASH: "of this client (source-hash)",
}
_NO_ADDRESS = address_from(bytes(16))


class Row(NamedTuple):
    step: str
    says: str


class Words:
    """The rows for one run of a program, on a socket's call or a packet, and its decision.

    ``step`` is the current one. ``only`` is the id of the endpoint that is used without a draw.
    """

    def __init__(
        self,
        facts: MapFacts,
        asked: Frontend,
        client: Client,
        found: list[Step],
        *,
        is_packet: bool,
    ) -> None:
        self.facts, self.asked, self.client = facts, asked, client
        self.is_packet = is_packet
        self.service: ServiceEntry | None = None
        self.candidates: Range | None = None
        self.only: int | None = None
        self.memory = "affinity"  # the map where affinity is looked up
        self.protocol = Protocol(asked.protocol).name
        self.rows = [row for row in map(self._row, found) if row]
        self._add_affinity(found)
        verdicts = [VERDICTS[step.value] for step in found if step.kind == "verdict"]
        self.verdict = next((it for it in reversed(verdicts) if it != "retried"), None)

    def _add_affinity(self, found: list[Step]) -> None:
        """Add a row if affinity was looked up and remembers no endpoint."""
        kinds = {step.kind for step in found}
        is_known = kinds & {"affinity_expired", "affinity_gone"} or self.only is not None
        if "affinity_asked" in kinds and not is_known:
            at = next((i for i, row in enumerate(self.rows) if row.step == "endpoint"), None)
            row = self._say("affinity_none", found[-1])
            self.rows.insert(len(self.rows) if at is None else at, row)

    def _row(self, step: Step) -> Row | None:
        if step.kind == "service":
            self.service = self.facts.service_at(self.asked._replace(address=step.address))
        elif step.kind in ("assigned", "affinity_used"):
            self.only = step.value
        elif step.kind == "affinity_asked":
            self.memory = "new_affinity" if step.value else "affinity"
        elif step.kind == "policy" and self.service:
            self.candidates = self.service.local if step.value & 1 else self.service.cluster
        if step.kind in WITHOUT_ROW or (step.kind == "policy" and not self.service):
            return None
        if step.kind in SENTENCES:
            return self._say(step.kind, step)
        values = _VALUES.get(step.kind)
        return self._say(f"{step.kind}={values[step.value] if values else step.value}", step)

    def _say(self, key: str, step: Step) -> Row:
        self.step = step
        question, _, result = SENTENCES[key].partition(": ")
        return Row(question, result.format(it=self, step=step))

    # What the sentences name.

    @property
    def service_name(self) -> str:
        return self.facts.service(self.step.value)

    @property
    def frontend(self) -> Frontend:
        return self.asked._replace(address=self.step.address)

    @property
    def frontend_kind(self) -> str:
        return frontend_kind(self.frontend, self.service.flags) if self.service else "frontend"

    @property
    def policy(self) -> str:
        assert self.service and self.candidates
        is_local, of_node = "local" in self.service.flags, self.step.value & 1
        says = f"{'Local' if is_local else 'Cluster'}: {self.candidates.size} of "
        says += "this node" if of_node else "all nodes"
        return says + (", as for all clients in the cluster" if is_local and not of_node else "")

    @property
    def timeout(self) -> str:
        return f"ClientIP, {self.service.affinity_seconds if self.service else 0} s"

    @property
    def until(self) -> str:
        if self.service is None:
            return ""
        key = affinity_key(self.client, self.service.id, is_packet=self.is_packet)
        entry = self.facts.maps[self.memory].get(key)
        if entry is None:
            return ""
        left = entry.last_used / 1e9 + self.service.affinity_seconds - time.monotonic()
        until = datetime.fromtimestamp(time.time() + left).astimezone()
        return f" until {until.isoformat(timespec='seconds')} (in {max(0, round(left))} s)"

    @property
    def endpoint(self) -> str:
        return self.facts.endpoint(self.facts.backend(self.step.value))

    @property
    def picked(self) -> str:
        return self.facts.endpoint(self.facts.slot(self.step.value))

    @property
    def how(self) -> str:
        scheduler = scheduler_of(self.service.flags) if self.service else RANDOM
        usual = "of this port" if self.is_packet else "at random this time"
        return _HOW.get(scheduler, f"{usual} (maglev)" if scheduler == MAGLEV else usual)

    @property
    def flow(self) -> str:
        name = FlowKind(self.step.value).name.lower().replace("_", "-")
        return name if self.step.address.is_unspecified else f"{name}: {self.step.address}"

    @property
    def chosen_id(self) -> int:
        return id_of(self.step.value)

    @property
    def chosen(self) -> str:
        masquerades = ", and masquerades" if self.step.value & Chosen.MASQUERADE else ""
        return self.facts.endpoint(self.facts.backend(self.chosen_id)) + masquerades


def affinity_key(client: Client, service: int, *, is_packet: bool) -> Any:
    """Return the key of a client's session affinity (bpf/rules/affinity.h)."""
    if is_packet and client.address is not None:
        return AffinityKey(0, client.address, service)
    return AffinityKey(client.netns, _NO_ADDRESS, service)


# A socket's call, and a packet from device to device.

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
