# SPDX-License-Identifier: Apache-2.0
"""Steps as rows: the question, its result, and the row of the map that decided."""

import time
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

from ebpflb.kernel import recording
from ebpflb.kernel.maps.layout import VERDICTS, address_from
from ebpflb.kernel.maps.records import AffinityKey
from ebpflb.kernel.recording import Step
from ebpflb.model.annotations import LEAST_CONNECTIONS, MAGLEV, RANDOM, ROUND_ROBIN, SOURCE_HASH
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Chosen, Frontend, Range, ServiceEntry, frontend_kind
from ebpflb.plan.flow_entries import FlowKind
from ebpflb.plan.tables import scheduler_of
from ebpflb.tools.explain.asking import Client, MapFacts

_USES = {
    0: ("no frontend, and no address of a service", "services", "none"),
    1: ("a service has this address, but not this port", "cluster_ips", ""),
    2: ("no service has this address, which is in a service range", "service_ranges", ""),
}
_SNAT = {
    "hairpin": "the client is the endpoint itself",
    "all": "--masquerade-all",
    "not_pod": "a client that is not a pod asks for a cluster IP",
    "local_client": "a pod asks for an external address",
    "elsewhere": "the endpoint is on another node, so replies must come back through this node",
    "here": "--masquerade-local-backends, though the endpoint is here",
    "asymmetric": "replies would leave by another device",
}
_SOURCES = {
    "by_route": ("as the kernel's route says", "", ""),
    "by_route_sources": ("by the route's source", "route_sources", ""),
    "by_devices": ("the address of the device", "devices", ""),
}

_NO_ADDRESS = address_from(bytes(16))


class Row(NamedTuple):
    """One row of the answer; ``map`` and ``row`` are empty if no map is involved."""

    step: str
    says: str
    map: str = ""
    row: str = ""


class Noted(NamedTuple):
    """The decisions of one run of a program, besides its rows."""

    rows: list[Row]
    verdict: str | None
    service: ServiceEntry | None
    candidates: Range | None
    only: int | None
    backend: int | None


# The rows of steps with a constant text.
ALWAYS_SAID = {
    "left_to_packets": Row(
        "socket",
        "--socket-translation=host: pods' packets are translated instead of their sockets",
        "settings",
        "host_sockets",
    ),
    "client_unknown": Row(
        "ranges",
        "the service has source ranges and a pod's socket has no address yet: its packets decide",
        "services",
        "restricted",
    ),
    "untracked": Row(
        "rules",
        "rules in raw exempt its packets from conntrack (NOTRACK): ebpflb leaves them alone",
        "services",
        "untracked",
    ),
    "passthrough": Row(
        "failover",
        "no endpoint for this client here: its packets go on to the router"
        " (externalFailoverPolicy Passthrough)",
        "services",
        "passthrough",
    ),
    "flow_replaced": Row("flow", "the packet starts a new flow that replaces this one"),
    "attaching": Row(
        "attach",
        "the first programs are still being attached: the flow tables open no flow yet",
        "settings",
        "attaching",
    ),
    "reply_device": Row(
        "reply",
        "leaves where the request came in, past the routes (--reply-path)",
        "settings",
        "reply_to_device",
    ),
}

# Steps without a row: their results are in other rows, or in the verdict.
WITHOUT_ROW = frozenset({"affinity_remembered", "answer", "direct", "errno", "verdict"})


class Words:
    """The words for one run: for a socket's call, or for one packet."""

    def __init__(
        self, facts: MapFacts, asked: Frontend, client: Client, *, is_packet: bool
    ) -> None:
        self.facts, self.asked, self.client = facts, asked, client
        self.is_packet = is_packet
        self.service: ServiceEntry | None = None
        self.candidates: Range | None = None
        self.only: int | None = None
        self.backend: int | None = None
        self._is_new = False  # affinity is looked up in the map new_affinity

    def noted(self, found: list[Step]) -> Noted:
        rows = [row for row in map(self._row, found) if row]
        if any(step.kind == "affinity_asked" for step in found) and self.only is None:
            rows = self._without_memory(rows, found)
        verdicts = [VERDICTS[step.value] for step in found if step.kind == "verdict"]
        counted = [verdict for verdict in verdicts if verdict != "retried"]
        last = counted[-1] if counted else None
        return Noted(rows, last, self.service, self.candidates, self.only, self.backend)

    def _row(self, step: Step) -> Row | None:
        if step.kind in SAID_BY_STATE:
            return SAID_BY_STATE[step.kind](self, step)
        return ALWAYS_SAID.get(step.kind)

    def _without_memory(self, rows: list[Row], found: list[Step]) -> list[Row]:
        """Add a row for a client without a row of affinity, before any choice."""
        if any(step.kind in ("affinity_expired", "affinity_gone") for step in found):
            return rows
        at = next((i for i, row in enumerate(rows) if row.step == "endpoint"), len(rows))
        nobody = Row("affinity", f"{self._timeout()}: no endpoint is remembered", *self._memory())
        return [*rows[:at], nobody, *rows[at:]]

    def _foreign(self, step: Step) -> Row:
        name = Protocol(self.asked.protocol).name
        return Row("socket", f"{name} sockets are left alone: their packets are translated instead")

    def _service(self, step: Step) -> Row:
        key = self.asked._replace(address=step.address)
        self.service = self.facts.service_at(key)
        what = frontend_kind(key, self.service.flags) if self.service else "frontend"
        row = f"{key}/{Protocol(key.protocol).name}"
        return Row("frontend", f"{what} of {self.facts.service(step.value)}", "services", row)

    def _address_use(self, step: Step) -> Row:
        says, name, row = _USES[step.value]
        return Row("frontend", says, name, row or str(self.asked.address))

    def _admission(self, step: Step) -> Row:
        word = "admit" if step.value else "do not admit"
        number = self.service.id if self.service else 0
        return Row("ranges", f"source ranges {word} {step.address}", "source_ranges", f"#{number}")

    def _assigned(self, step: Step) -> Row:
        self.only = self.backend = step.value
        said = f"the socket keeps {self._endpoint(step.value)}"
        return Row("socket", said, "assignments", f"#{step.value}")

    def _policy(self, step: Step) -> Row | None:
        if self.service is None:
            return None
        local = bool(step.value & 1)
        self.candidates = listed = self.service.local if local else self.service.cluster
        is_local = "local" in self.service.flags
        says = f"{'Local' if is_local else 'Cluster'}: "
        says += f"{listed.size} of this node" if local else f"{listed.size} of all nodes"
        if is_local and not local:
            says += ", as for all clients in the cluster"
        row = f"{listed.base}-{listed.base + listed.size - 1}" if listed.size else "none"
        return Row("policy", says, "services", f"{'local' if local else 'cluster'} slots {row}")

    def _affinity_asked(self, step: Step) -> None:
        self._is_new = bool(step.value)

    def _affinity_expired(self, step: Step) -> Row:
        said = f"{self._timeout()}: {self._endpoint(step.value)} has expired"
        return Row("affinity", said, *self._memory())

    def _affinity_gone(self, step: Step) -> Row:
        said = f"{self._timeout()}: {self._endpoint(step.value)} is no longer available"
        return Row("affinity", said, *self._memory())

    def _affinity_used(self, step: Step) -> Row:
        self.only = self.backend = step.value
        said = f"remembers {self._endpoint(step.value)} {self._until()}".rstrip()
        return Row("affinity", said, *self._memory())

    def _node_local(self, step: Step) -> Row:
        found = self.facts.slot(step.value)
        self.backend = found.id if found else None
        said = f"what listens on this node, while it answers: {self.facts.endpoint(found)}"
        return Row("endpoint", said, "slots", str(step.value))

    def _unknown_port(self, step: Step) -> Row:
        way = ", and the route leads back to where the packet came from" if step.value else ""
        says = f"a load balancer's address, but no service has this port{way}"
        return Row("address", f"{says} (--load-balancer-unknown-ports)", "settings", "flags")

    def _slot(self, step: Step) -> Row:
        found = self.facts.slot(step.value)
        self.backend = found.id if found else None
        how = "of this port" if self.is_packet else "at random this time"
        scheduler = scheduler_of(self.service.flags) if self.service else RANDOM
        if scheduler == ROUND_ROBIN:
            how = "the next in turn (round-robin)"
        elif scheduler == LEAST_CONNECTIONS:
            how = "the one with fewer connections of two drawn at random (least-connections)"
        elif scheduler == SOURCE_HASH:
            how = "of this client (source-hash)"
        elif scheduler == MAGLEV:
            how = f"{how} (maglev)"
        return Row("endpoint", f"{how}: {self.facts.endpoint(found)}", "slots", str(step.value))

    def _flow(self, step: Step) -> Row:
        name = FlowKind(step.value).name.lower().replace("_", "-")
        table = "tcp_flows" if self.asked.protocol == Protocol.TCP else "other_flows"
        to = "" if step.address.is_unspecified else f": {step.address}"
        return Row("flow", f"has an entry of kind {name}{to}", table, str(self.client.address))

    def _snat(self, step: Step) -> Row:
        return Row(
            "SNAT",
            f"needed: {_SNAT[recording.MASQUERADES[step.value]]}",
            "settings",
            "flags",
        )

    def _source(self, step: Step) -> Row:
        how, name, row = _SOURCES[recording.STEP_SOURCES[step.value]]
        return Row("SNAT", f"source {step.address}, {how}", name, row or ("route" if name else ""))

    def _chosen(self, step: Step) -> Row:
        """Return which element of netfilter's table translates the packet."""
        self.backend = step.value & Chosen.ID
        masquerades = step.value & Chosen.MASQUERADE
        said = f"netfilter translates to {self._endpoint(self.backend)}"
        said += ", and masquerades" if masquerades else ""
        name = f"backends{step.address.version}"
        return Row("DNAT", said, name, f"#{self.backend}")

    def _opened(self, step: Step) -> Row:
        says = ("a flow is opened", "a flow is opened, from another port", "no free port", "full")
        table = "tcp_flows" if self.asked.protocol == Protocol.TCP else "other_flows"
        return Row("DNAT", says[step.value], table, "a new one")

    def _endpoint(self, backend: int) -> str:
        return self.facts.endpoint(self.facts.backend(backend))

    def _timeout(self) -> str:
        return f"ClientIP, {self.service.affinity_seconds if self.service else 0} s"

    def _memory(self) -> tuple[str, str]:
        """Return the map and the row of a client's affinity."""
        who = str(self.client.address) if self.is_packet else f"netns {self.client.netns}"
        number = self.service.id if self.service else 0
        return "new_affinity" if self._is_new else "affinity", f"{who} #{number}"

    def _until(self) -> str:
        if self.service is None:
            return ""
        entry = self.facts.maps[self._memory()[0]].get(self._affinity_key(self.service.id))
        if entry is None:
            return ""
        left = entry.last_used / 1e9 + self.service.affinity_seconds - time.monotonic()
        until = datetime.fromtimestamp(time.time() + left).astimezone()
        return f"until {until.isoformat(timespec='seconds')} (in {max(0, round(left))} s)"

    def _affinity_key(self, service: int) -> Any:
        return affinity_key(self.client, service, is_packet=self.is_packet)


# Kind of step -> the function that makes its row, from the step and the steps before.
SAID_BY_STATE: dict[str, Callable[[Words, Step], Row | None]] = {
    "foreign": Words._foreign,
    "service": Words._service,
    "address_use": Words._address_use,
    "admission": Words._admission,
    "assigned": Words._assigned,
    "policy": Words._policy,
    "affinity_asked": Words._affinity_asked,
    "affinity_expired": Words._affinity_expired,
    "affinity_gone": Words._affinity_gone,
    "affinity_used": Words._affinity_used,
    "slot": Words._slot,
    "node_local": Words._node_local,
    "unknown_port": Words._unknown_port,
    "flow": Words._flow,
    "snat": Words._snat,
    "source": Words._source,
    "chosen": Words._chosen,
    "opened": Words._opened,
}


def affinity_key(client: Client, service: int, *, is_packet: bool) -> Any:
    """Return the key of a client's session affinity (bpf/rules/affinity.h)."""
    if is_packet and client.address is not None:
        return AffinityKey(0, client.address, service)
    return AffinityKey(client.netns, _NO_ADDRESS, service)
