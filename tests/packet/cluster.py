# SPDX-License-Identifier: Apache-2.0
"""From API objects to the outcome of a packet: model, plan, maps and programs together.

Services are called shop/web and so on; endpoints are here (a, b) or there (c, d) of their family.
An outcome names what happened to a client's first packets: "refused", "dropped" or
"left alone"; or else the endpoint that got them, with a star if they were masqueraded.
"""

import dataclasses
from typing import Any, NamedTuple

import msgspec

from ebpflb.entries.services import NO_SLOT
from ebpflb.lab import manifests
from ebpflb.model import objects
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Changed, Key, Kind, ReadObject, Removed
from ebpflb.model.services import PortName
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.desired import DesiredService
from ebpflb.plan.planner import NOT_IN_MAPS, Planner
from tests.model.builders import ports_of
from tests.packet.frames import at, destination, ends, host_of, opening, reply, source
from tests.packet.node import Outcome, PacketNode
from tests.packet.places import Places
from tests.plan.builders import desired_service

TARGET = 8080
CONNECTIONS = 16  # they meet every endpoint: which one is a function of the tuple
OUTCOMES = {
    "refused": "refused",
    "passed": "left alone",
    "source_denied": "dropped",
    "no_local_endpoint": "dropped",
    "unallocated": "dropped",
}


class Pods(NamedTuple):
    """The endpoints of one family; a and b are on this node."""

    a: str
    b: str
    c: str
    d: str


def pods(places: Places) -> Pods:
    def neighbour(host: str) -> str:
        return host[:-1] + "1"

    return Pods(places.here, neighbour(places.here), places.there, neighbour(places.there))


class Cluster:
    """A cluster's state, as one node has it in its maps."""

    def __init__(self, node: PacketNode, places: Places, protocol: str = "tcp") -> None:
        """Ports have this protocol, unless they give another."""
        self.node, self.places, self.pods = node, places, pods(places)
        self.protocol = protocol
        entries = {name: opened.spec.entries for name, opened in node.maps.items()}
        self.planner = Planner(
            Capacity(
                services=entries["services"],
                slots=entries["slots"],
                service_ids=entries["service_stats"],
                backend_ids=entries["backend_slots"],
                source_ranges=entries["source_ranges"],
                choices=entries["choices"],
            )
        )
        self.cluster = ClusterState("here")
        self.names: dict[Key, set[PortName]] = {}
        self.time = 0.0
        self.port = 50_000

    def service(self, name: str = "web", **spec: Any) -> None:
        """A Service with a cluster IP and port 80; ``ingress`` is its status."""
        ports = self._ports(spec.pop("ports", [{"port": 80}]))
        manifest = manifests.service(
            name, [self.places.cluster_ip], ports, namespace="shop", **spec
        )
        self._apply(Key("shop", name), msgspec.convert(manifest, objects.Service))

    def endpoints(
        self, *described: str, name: str = "web", ports: list[dict[str, Any]] | None = None
    ) -> None:
        """All that there are, as "a", "b unready", "c leaving" (serving) or "d gone" (not)."""
        manifest = manifests.endpoint_slice(
            name,
            f"IPv{self.places.version}",
            [self._endpoint(*words.split()) for words in described],
            self._ports(ports or [{"port": TARGET}]),
            name=name,
            namespace="shop",
        )
        self._apply(Key("shop", name), msgspec.convert(manifest, objects.EndpointSlice))

    def withdraw(self, name: str = "web") -> None:
        """The Service is deleted, its slice outlives it."""
        self.cluster.apply(Removed(Kind.SERVICE, Key("shop", name)))
        self._write()

    def outcome_of(self, sender: str, where: str, protocol: str = "") -> str:
        """The outcome; the endpoints by their letters. No client's port is used twice.

        One flow of each outcome is also answered.
        """
        host = getattr(self.pods, sender, None) or getattr(self.places, sender)
        into = "pods" if host in (self.places.pod, *self.pods[:2]) else "uplink"
        outcomes: set[str] = set()
        for port in range(self.port, self.port + CONNECTIONS):
            client = at(host, port)
            came = self.node.ingress(opening(protocol or self.protocol, client, where), into)
            outcomes.add(self._outcome(came, client, where, into, outcomes))
        self.port += CONNECTIONS
        return " ".join(sorted(outcomes))

    def _outcome(self, came: Outcome, client: str, where: str, into: str, met: set[str]) -> str:
        if "translated" not in came.verdicts:
            (verdict,) = came.verdicts
            return OUTCOMES[verdict]
        to = host_of(destination(came.packet))
        by = "pods" if to in self.pods[:2] else "uplink"
        left = self.node.egress(came.frame, by, into).packet
        outcome = Pods._fields[self.pods.index(to)] + "*" * (source(left) != client)
        if outcome not in met:
            answer = self.node.ingress(reply(left), by)
            assert ends(self.node.egress(answer.frame, into, by).packet) == f"{where} > {client}"
        return outcome

    def _ports(self, listed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"protocol": self.protocol.upper(), **port} for port in listed]

    def _endpoint(self, letter: str, state: str = "ready") -> dict[str, Any]:
        return manifests.endpoint(
            getattr(self.pods, letter),
            node="here" if letter in "ab" else "there",
            target=letter,
            ready=state == "ready",
            serving=state in ("ready", "leaving"),
            terminating=state in ("leaving", "gone"),
        )

    def _apply(self, key: Key, object: objects.Service | objects.EndpointSlice) -> None:
        kind = Kind(type(object).__name__)
        assert not self.cluster.apply(Changed(kind, key, ReadObject(object, "test"))).warnings
        self._write()

    def _write(self) -> None:
        """Plan the changes and write the plan, like the agent."""
        self.time += 60
        plan = self.planner.plan_changes(self._desired(), self.time)
        for part in dataclasses.fields(plan):
            rows = getattr(plan, part.name)
            if part.name == "removed_backend_slots":
                self.node.maps["backend_slots"].write([(id, NO_SLOT) for id in rows])
            elif part.name == "tables":
                self.node.maps["choices"].write([row for table in rows for row in table.rows()])
            elif part.name not in NOT_IN_MAPS:
                write = self.node.delete if part.name.startswith("removed_") else self.node.write
                write(part.name.removeprefix("removed_"), rows)
        self.planner.written(self.time)

    def _desired(self) -> dict[PortName, DesiredService | None]:
        changes: dict[PortName, DesiredService | None] = {}
        for key in self.cluster.take_changed_services():
            found = {
                p.name: desired_service(p, chosen) for p, chosen in ports_of(self.cluster, key)
            }
            changes |= dict.fromkeys(self.names.get(key, set()) - found.keys())
            changes |= found
            self.names[key] = set(found)
        return changes
