# SPDX-License-Identifier: Apache-2.0
"""Small valid objects, written as in a manifest; a test gives only the values that it is about."""

from collections.abc import Iterator
from typing import Any

import msgspec

from ebpflb.lab import manifests
from ebpflb.model import addresses, endpoint_slices, endpoints, objects, services
from ebpflb.model.cluster_state import ClusterState
from ebpflb.model.events import Key


def service(
    *,
    name: str = "web",
    namespace: str = "shop",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    ingress: list[dict[str, str]] | None = None,
    **spec: Any,
) -> objects.Service:
    """Return an IPv4 ClusterIP Service with one unnamed port 80."""
    ports = spec.pop("ports", [{"port": 80}])
    manifest = manifests.service(
        name,
        ["172.30.0.41"],
        ports,
        namespace=namespace,
        labels=labels,
        annotations=annotations,
        ingress=ingress,
        **spec,
    )
    return msgspec.convert(manifest, objects.Service)


def annotated(name: str, text: str | None) -> dict[str, str]:
    """Return the annotation, or none if there is no text."""
    return {} if text is None else {name: text}


def dual_stack(**spec: Any) -> objects.Service:
    both = {"clusterIPs": ["172.30.0.41", "fd00:30::41"], "ipFamilies": ["IPv4", "IPv6"]}
    return service(**(both | spec))


def only_port(subject: objects.Service) -> services.ServicePort:
    (port,) = services.parse(subject).ports
    return port


def slice(
    *entries: dict[str, Any],
    name: str = "web-abcde",
    namespace: str = "shop",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    family: str = "IPv4",
    ports: list[dict[str, Any]] | None = None,
) -> objects.EndpointSlice:
    """Return a slice of shop/web with one unnamed port 8080."""
    found = [{"port": 8080}] if ports is None else ports
    manifest = manifests.endpoint_slice(
        "web",
        family,
        list(entries),
        found,
        name=name,
        namespace=namespace,
        labels=labels,
        annotations=annotations,
    )
    return msgspec.convert(manifest, objects.EndpointSlice)


def stored(subject: objects.EndpointSlice) -> endpoint_slices.StoredSlice:
    found, _ = endpoint_slices.read(subject)
    assert found is not None
    return found


def entry(*listed: str, **fields: Any) -> dict[str, Any]:
    return {"addresses": list(listed)} | fields


def port_name(
    port: str = "",
    protocol: services.Protocol = services.Protocol.TCP,
    family: addresses.Family = addresses.Family.IPV4,
) -> services.PortName:
    return services.PortName("shop", "web", port, protocol, family)


def endpoint(
    target: str,
    *,
    ready: bool = True,
    serving: bool | None = None,
    terminating: bool = False,
    local: bool = False,
    zones: str = "",
    nodes: str = "",
) -> endpoints.Endpoint:
    """Return an endpoint, which serves by default if it is ready; hints are words in a string."""
    return endpoints.Endpoint(
        address=addresses.parse_address(f"10.1.0.{ord(target)}"),
        port=8080,
        ready=ready,
        serving=ready if serving is None else serving,
        terminating=terminating,
        local=local,
        name=endpoint_slices.EndpointName("", target),
        hints=endpoint_slices.Hints(frozenset(zones.split()), frozenset(nodes.split())),
    )


def leaving(target: str, *, local: bool = False, zones: str = "") -> endpoints.Endpoint:
    """Return an endpoint that is serving and terminating."""
    return endpoint(target, ready=False, serving=True, terminating=True, local=local, zones=zones)


def service_cidr(*cidrs: str) -> objects.ServiceCIDR:
    return msgspec.convert(manifests.service_cidr(*cidrs), objects.ServiceCIDR)


def node(
    *listed: tuple[str, str], labels: dict[str, str] | None = None, **spec: Any
) -> objects.Node:
    return msgspec.convert(manifests.node("here", *listed, labels=labels, **spec), objects.Node)


def ports_of(
    cluster: ClusterState, service: Key
) -> Iterator[tuple[services.ServicePort, endpoints.Selection]]:
    """Yield the service's ports, each with the endpoints that this node uses."""
    slices = cluster.slices_of_ports(service)
    for port in cluster.services.get(service, ()):
        its = endpoints.of_port(slices, port.name)
        yield port, endpoints.finished(cluster.selecting(port.name, its))
