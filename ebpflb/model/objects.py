# SPDX-License-Identifier: Apache-2.0
"""The API's objects, each kind with only the fields that are used; and checks of their fields.

msgspec decodes them directly from JSON (or converts them from YAML) and names the field that does
not fit; unknown fields are skipped. The API writes null for an empty list, hence ``| None``.
Decoded objects contain no cycles, so the garbage collector need not track them (``gc=False``): with
100,000 endpoints this saves memory and pauses.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct, field, structs

from ebpflb.errors import InvalidObject

# How the annotations of ebpflb begin, and the others that are used.
OURS = "ebpflb.io/"
TRIGGER_TIME = "endpoints.kubernetes.io/last-change-trigger-time"  # kube-proxy.md 16.4
# The addresses that a Service asks for, and the text under which it shares one: ours first, then
# those of MetalLB and kube-vip that mean the same (pools.py).
REQUESTED = (
    "ebpflb.io/load-balancer-ips",
    *("metallb.io/loadBalancerIPs", "metallb.universe.tf/loadBalancerIPs"),
    "kube-vip.io/loadbalancerIPs",
)
SHARING = (
    "ebpflb.io/allow-shared-ip",
    *("metallb.io/allow-shared-ip", "metallb.universe.tf/allow-shared-ip"),
)
OF_OTHERS = frozenset((*REQUESTED[1:], *SHARING[1:], TRIGGER_TIME))


class Metadata(Struct, frozen=True, gc=False, rename="camel"):
    """The part of ObjectMeta that names an object and carries the labels kube-proxy looks at."""

    name: str
    namespace: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None


class Annotated(Metadata, frozen=True, gc=False, rename="camel"):
    """Metadata with ``annotations``, reduced to those with our prefix and OF_OTHERS."""

    annotations: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError for a value that is not a string, as a manifest may have."""
        every = (self.annotations or {}).items()
        kept = {
            name: text
            for name, text in every
            if text is not None and (name.startswith(OURS) or name in OF_OTHERS)
        }
        if wrong := [name for name, text in kept.items() if not isinstance(text, str)]:
            raise ValueError(f"annotation {wrong[0]}: expected a string")
        structs.force_setattr(self, "annotations", kept or None)

    def annotation(self, name: str) -> str | None:
        return self.annotations.get(name) if self.annotations else None


class ServicePortSpec(Struct, frozen=True, gc=False, rename="camel"):
    """One entry of Service spec.ports."""

    port: int
    name: str | None = None
    protocol: str = "TCP"
    node_port: int = 0
    app_protocol: str | None = None


class ClientIPConfig(Struct, frozen=True, gc=False, rename="camel"):
    timeout_seconds: int | None = None


class SessionAffinityConfig(Struct, frozen=True, gc=False):
    client_ip: ClientIPConfig | None = field(name="clientIP", default=None)


class ServiceSpec(Struct, frozen=True, gc=False, rename="camel"):
    """Service spec, without fields that kube-proxy ignores (selector, targetPort, ...)."""

    type: str = "ClusterIP"
    cluster_ip: str = field(name="clusterIP", default="")
    cluster_ips: list[str] | None = field(name="clusterIPs", default=None)
    ip_families: list[str] | None = None
    ports: list[ServicePortSpec] | None = None
    external_ips: list[str] | None = field(name="externalIPs", default=None)
    load_balancer_source_ranges: list[str] | None = None
    session_affinity: str = "None"
    session_affinity_config: SessionAffinityConfig | None = None
    internal_traffic_policy: str | None = None
    external_traffic_policy: str | None = None
    external_failover_policy: str | None = None
    health_check_node_port: int = 0
    load_balancer_class: str | None = None
    load_balancer_ip: str | None = field(name="loadBalancerIP", default=None)


class LoadBalancerIngress(Struct, frozen=True, gc=False, rename="camel"):
    ip: str | None = None
    ip_mode: str | None = None


class LoadBalancerStatus(Struct, frozen=True, gc=False):
    ingress: list[LoadBalancerIngress] | None = None


class ServiceStatus(Struct, frozen=True, gc=False, rename="camel"):
    load_balancer: LoadBalancerStatus | None = None


class Service(Struct, frozen=True, gc=False):
    """v1 Service."""

    metadata: Annotated
    spec: ServiceSpec
    status: ServiceStatus | None = None


class EndpointConditions(Struct, frozen=True, gc=False):
    """Absent means: ready, serving, not terminating (kube-proxy.md 2)."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Hint(Struct, frozen=True, gc=False):
    name: str


class EndpointHints(Struct, frozen=True, gc=False, rename="camel"):
    for_zones: list[Hint] | None = None
    for_nodes: list[Hint] | None = None


class TargetReference(Struct, frozen=True, gc=False):
    name: str = ""


class SliceEndpoint(Struct, frozen=True, gc=False, rename="camel"):
    """One entry of EndpointSlice endpoints."""

    addresses: list[str] | None = None
    conditions: EndpointConditions | None = None
    node_name: str | None = None
    zone: str | None = None
    hints: EndpointHints | None = None
    target_ref: TargetReference | None = None


class SlicePort(Struct, frozen=True, gc=False):
    """One entry of EndpointSlice ports; the API defaults name to "" and protocol to TCP."""

    name: str | None = ""
    port: int | None = None
    protocol: str | None = "TCP"


class EndpointSlice(Struct, frozen=True, gc=False, rename="camel"):
    """discovery.k8s.io/v1 EndpointSlice."""

    metadata: Annotated
    address_type: str
    endpoints: list[SliceEndpoint] | None = None
    ports: list[SlicePort] | None = None


class NodeAddress(Struct, frozen=True, gc=False):
    type: str
    address: str


class NodeCondition(Struct, frozen=True, gc=False):
    type: str
    status: str


class NodeStatus(Struct, frozen=True, gc=False):
    """The addresses, and of the conditions the one that counts here: others change often."""

    addresses: list[NodeAddress] | None = None
    conditions: list[NodeCondition] | None = None

    def __post_init__(self) -> None:
        ready = [each for each in self.conditions or () if each.type == "Ready"]
        structs.force_setattr(self, "conditions", ready or None)


class Taint(Struct, frozen=True, gc=False):
    key: str


class NodeSpec(Struct, frozen=True, gc=False):
    pod_cidrs: list[str] | None = field(name="podCIDRs", default=None)
    pod_cidr: str = field(name="podCIDR", default="")
    taints: list[Taint] | None = None


class Node(Struct, frozen=True, gc=False):
    """v1 Node: its zone label, addresses, pods' addresses and taints, and whether it is ready."""

    metadata: Metadata
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class ServiceCIDRSpec(Struct, frozen=True, gc=False):
    cidrs: list[str] | None = None


class ServiceCIDR(Struct, frozen=True, gc=False):
    """networking.k8s.io/v1 ServiceCIDR: the ranges of cluster IPs."""

    metadata: Metadata
    spec: ServiceCIDRSpec | None = None


Object = Service | EndpointSlice | Node | ServiceCIDR


# Checks of single fields: each returns the value, or raises InvalidObject naming the field.
#
# kube-proxy relies on the API server's validation, but manifests skip it.

LONGEST_LABEL = 63  # characters (RFC 1123)

_Meaning = TypeVar("_Meaning")


def filled(field: str, value: str) -> str:
    if not value:
        raise InvalidObject(field, "is empty")
    return value


def short(field: str, value: str) -> str:
    """A name that is not longer than a label of DNS, as Kubernetes has it for Services and their
    ports, and as the maps can hold it.
    """
    if len(value) > LONGEST_LABEL:
        raise InvalidObject(field, f"longer than {LONGEST_LABEL} characters")
    return value


def within(field: str, value: int, allowed: range) -> int:
    if value not in allowed:
        raise InvalidObject(field, f"{value} is not in {allowed[0]}..{allowed[-1]}")
    return value


def one_of(field: str, value: str, meanings: Mapping[str, _Meaning]) -> _Meaning:
    if value not in meanings:
        raise InvalidObject(field, f'"{value}" is not one of {", ".join(meanings)}')
    return meanings[value]


def parsed(field: str, parse: Callable[[str], _Meaning], text: str) -> _Meaning:
    """Return the parsed text; ``parse`` raises ValueError with a message for the operator."""
    try:
        return parse(text)
    except ValueError as error:
        raise InvalidObject(field, str(error)) from error
