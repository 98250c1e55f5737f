# SPDX-License-Identifier: Apache-2.0
"""The datapath's steps as rows, each a question and its result."""

import time
from datetime import datetime
from typing import Any, NamedTuple

from ebpflb.entries.flows import FlowKind
from ebpflb.entries.services import Chosen, Frontend, Range, ServiceEntry, frontend_kind, id_of
from ebpflb.kernel import recording
from ebpflb.kernel.maps.layout import VERDICTS, address_from
from ebpflb.kernel.maps.records import AffinityKey
from ebpflb.kernel.recording import Step
from ebpflb.model.annotations import LEAST_CONNECTIONS, MAGLEV, RANDOM, ROUND_ROBIN, SOURCE_HASH
from ebpflb.model.services import Protocol
from ebpflb.plan.tables import scheduler_of
from ebpflb.tools.explain.asking import Client, MapFacts

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
