# SPDX-License-Identifier: Apache-2.0
"""A cluster's objects with their history."""

import json
from typing import Any, NamedTuple

from ebpflb.cluster import decoding
from ebpflb.lab import manifests
from ebpflb.model.annotations import (
    NODEPORT_RANGES_ANNOTATION,
    ON_REMOVAL_ANNOTATION,
    SCHEDULER_ANNOTATION,
    SCHEDULERS,
    SLOW_START_ANNOTATION,
    WEIGHT_ANNOTATION,
)
from ebpflb.model.events import Changed, Event, Key, Kind, ReadObject, Removed, Replaced
from tests.simulation.places import (
    FAMILIES,
    INSIDE_RANGE,
    NODE,
    NODE_ADDRESS,
    NODE_RANGE,
    POD_CIDR,
    PORTS,
    balanced_ip,
    cluster_ip,
    external_ip,
    is_here,
    network_of_family,
    node_port,
    of_family,
)

SERVICES, SLICES, ENDPOINTS = 3, 2, 3
SLOW_SECONDS = "3s"
POLICIES = "Cluster", "Local"
WEIGHTS = (None, "0", "30", "700")
GRACES = {"reset=0s": 0.0, "reset=2s": 2.0}  # seconds, by the value of the annotation
_ON_REMOVAL = ("", *GRACES, "keep")
Json = dict[str, Any]


class Shape(NamedTuple):
    """The form of a Service, by the bits of a number; 0 means one ClusterIP."""

    families: tuple[int, ...]
    affinity: bool
    internal_local: bool
    external_local: bool
    node_port: bool
    balanced: bool
    ranges: tuple[str, ...]
    nodeport_ranges: bool
    scheduler: str
    slow: bool
    external_ips: bool
    on_removal: str

    @staticmethod
    def of(bits: int) -> "Shape":
        families = ((4,), (6,), (4, 6), (4, 6))[bits & 3]
        external = bits >> 5 & 3
        return Shape(
            families,
            affinity=bool(bits >> 2 & 1),
            internal_local=bool(bits >> 3 & 1),
            external_local=bool(bits >> 4 & 1),
            node_port=external > 1,
            balanced=external == 3,
            ranges=_RANGES[bits >> 7 & 3],
            nodeport_ranges=bool(bits >> 9 & 1),
            scheduler=SCHEDULERS[bits >> 10 & 3],
            slow=bool(bits >> 12 & 1),
            external_ips=bool(bits >> 13 & 1),
            on_removal=_ON_REMOVAL[bits >> 14 & 3],
        )

    @property
    def spec(self) -> Json:
        """Return the fields of a Service that do not depend on its addresses."""
        found: Json = {"internalTrafficPolicy": POLICIES[self.internal_local]}
        if self.affinity:
            found["sessionAffinity"] = "ClientIP"
        if self.node_port:
            found["type"] = "LoadBalancer" if self.balanced else "NodePort"
        if self.node_port or self.external_ips:
            found["externalTrafficPolicy"] = POLICIES[self.external_local]
        if self.balanced and self.ranges:
            found["loadBalancerSourceRanges"] = list(self.ranges)
        return found

    @property
    def annotations(self) -> dict[str, str]:
        found = {SCHEDULER_ANNOTATION: self.scheduler}
        if self.on_removal:
            found[ON_REMOVAL_ANNOTATION] = self.on_removal
        if self.slow:
            found[SLOW_START_ANNOTATION] = SLOW_SECONDS
        if self.nodeport_ranges and self.node_port:
            found[NODEPORT_RANGES_ANNOTATION] = ",".join(_BOTH_FAMILIES)
        return found


SHAPE_BITS = 16
_BOTH_FAMILIES = INSIDE_RANGE, network_of_family(INSIDE_RANGE, 6)
_RANGES: tuple[tuple[str, ...], ...] = (
    (),
    _BOTH_FAMILIES,
    (INSIDE_RANGE,),
    (*_BOTH_FAMILIES, NODE_RANGE, network_of_family(NODE_RANGE, 6)),
)


class Change(NamedTuple):
    """One change of one object; ``object`` is its last state if it was deleted."""

    version: int
    type: str
    key: Key
    object: Json


class Cluster:
    """The objects of the API server; every change gets the next resource version."""

    def __init__(self) -> None:
        self.version = 1
        self.objects: dict[Kind, dict[Key, Json]] = {kind: {} for kind in Kind}
        self.history: dict[Kind, list[Change]] = {kind: [] for kind in Kind}
        self.uid = 0
        own = [of_family(NODE_ADDRESS, version) for version in FAMILIES]
        pods = [network_of_family(POD_CIDR, version) for version in FAMILIES]
        ranges = [network_of_family("10.96.0.0/24", version) for version in FAMILIES]
        self.put(Kind.NODE, manifests.node(NODE, *own, pod_cidrs=pods))
        self.put(Kind.SERVICE_CIDR, manifests.service_cidr(*ranges))

    def put(self, kind: Kind, object: Json) -> None:
        """Create or change an object; a new object has a uid of its own."""
        key = key_of(object)
        former = self.objects[kind].get(key)
        self.version += 1
        self.uid += former is None
        uid = former["metadata"]["uid"] if former else f"uid-{self.uid}"
        marks = {"resourceVersion": str(self.version), "uid": uid}
        object = object | {"metadata": object["metadata"] | marks}
        self.objects[kind][key] = object
        self._note(kind, "MODIFIED" if former else "ADDED", key, object)

    def delete(self, kind: Kind, name: str) -> None:
        key = Key("d", name)
        last = self.objects[kind].pop(key, None)
        if last:
            self.version += 1
            marks = last["metadata"] | {"resourceVersion": str(self.version)}
            self._note(kind, "DELETED", key, last | {"metadata": marks})

    def _note(self, kind: Kind, type: str, key: Key, object: Json) -> None:
        self.history[kind].append(Change(self.version, type, key, object))

    def put_service(self, number: int, ip: int, ports: int, bits: int) -> None:
        """Put a Service, named by a number, with the first ``ports`` of PORTS. This has no effect
        if another Service has the address, which the API server refuses.
        """
        key, shape = Key("d", f"s{number}"), Shape.of(bits)
        addresses = [cluster_ip(ip, version) for version in shape.families]
        for other, object in self.objects[Kind.SERVICE].items():
            if other != key and object["spec"]["clusterIP"].endswith(addresses[0][-1:]):
                return
        if former := self.objects[Kind.SERVICE].get(key):
            addresses = former["spec"]["clusterIPs"]  # they cannot be changed
            ip = int(addresses[0][-1]) - 1
        named = [_port(shape, ip, name) for name in list(PORTS)[:ports]]
        made = manifests.service(
            key.name,
            addresses,
            named,
            namespace="d",
            annotations=shape.annotations,
            ingress=[balanced_ip(ip, v) for v in shape.families if shape.balanced],
            externalIPs=[external_ip(ip, v) for v in shape.families if shape.external_ips],
            **shape.spec,
        )
        self.put(Kind.SERVICE, made)

    def put_policies(self, number: int, internal: int, external: int) -> None:
        """Change only a service's policies; 0 means Cluster, 1 Local."""
        found = self.objects[Kind.SERVICE].get(Key("d", f"s{number}"))
        if not found:
            return
        spec = found["spec"] | {"internalTrafficPolicy": POLICIES[internal]}
        if "externalTrafficPolicy" in spec:
            spec["externalTrafficPolicy"] = POLICIES[external]
        self.put(Kind.SERVICE, found | {"spec": spec})

    def put_slice(
        self, number: int, part: int, version: int, ready: int, leaving: int, weight: int
    ) -> None:
        """Put a slice of a service: its endpoints by the bits of ``ready`` and ``leaving``."""
        endpoints = []
        for at in range(ENDPOINTS):
            bit, address = 1 << at, f"10.1.{number}.{part * ENDPOINTS + at + 1}"
            if ready & bit or leaving & bit:
                gone = not ready & bit
                how = {"ready": not gone, "terminating": gone}
                address = of_family(address, version)
                node = NODE if is_here(part * ENDPOINTS + at + 1) else "node-2"
                endpoints.append(
                    manifests.endpoint(address, node=node, target=f"pod-{address}", **how)
                )
        ports = [
            {"name": name, "port": 8000 + port, "protocol": protocol}
            for name, (port, protocol) in PORTS.items()
        ]
        chosen = WEIGHTS[weight]
        annotations = {WEIGHT_ANNOTATION: chosen} if chosen else None
        made = manifests.endpoint_slice(
            f"s{number}",
            f"IPv{version}",
            endpoints,
            ports,
            name=slice_name(number, part, version),
            namespace="d",
            annotations=annotations,
        )
        self.put(Kind.ENDPOINT_SLICE, made)

    def listed(self, kind: Kind) -> Replaced:
        """Return the current objects, as in a list."""
        return Replaced(kind, dict(read(kind, each) for each in self.objects[kind].values()))


def _port(shape: Shape, ip: int, name: str) -> Json:
    port, protocol = PORTS[name]
    at_node = {"nodePort": node_port(ip, name)} if shape.node_port else {}
    return {"name": name, "port": port, "protocol": protocol} | at_node


def slice_name(number: int, part: int, version: int) -> str:
    return f"s{number}-{part}-{version}"


def key_of(object: Json) -> Key:
    return Key(object["metadata"].get("namespace", ""), object["metadata"]["name"])


def read(kind: Kind, object: Json) -> tuple[Key, ReadObject]:
    """Read objects as the API's lists and watches do."""
    return decoding.read_object(kind, json.dumps(object).encode(), "simulation")


def event_of(kind: Kind, change: Change) -> Event:
    if change.type == "DELETED":
        return Removed(kind, change.key)
    return Changed(kind, *read(kind, change.object))
