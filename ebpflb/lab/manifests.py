# SPDX-License-Identifier: Apache-2.0
"""Objects of Kubernetes as manifests, as `kubectl get -o yaml` would show them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]


def service(
    name: str,
    ips: list[str],
    ports: list[Manifest],
    *,
    namespace: str = "default",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    ingress: Iterable[str | Manifest] | None = (),
    **spec: Any,
) -> Manifest:
    """Return a Service, which has both families if ``ips`` has two addresses.

    ``ingress`` has the addresses of its load balancer, or whole entries of the status.
    """
    families = ["IPv6" if ":" in ip else "IPv4" for ip in ips]
    usual = {"clusterIP": ips[0], "clusterIPs": ips, "ipFamilies": families, "ports": ports}
    entries = [{"ip": it} if isinstance(it, str) else it for it in ingress or ()]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(name, namespace=namespace, labels=labels, annotations=annotations),
        "spec": usual | spec,
        "status": {"loadBalancer": {"ingress": entries} if entries else {}},
    }


def endpoint_slice(
    service: str,
    family: str,
    endpoints: list[Manifest],
    ports: list[Manifest],
    *,
    name: str | None = None,
    namespace: str = "default",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> Manifest:
    """Return an EndpointSlice of a Service, with the label that names it unless ``labels`` are
    given.
    """
    labels = {"kubernetes.io/service-name": service} if labels is None else labels
    name = f"{service}-{family.lower()}" if name is None else name
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": _metadata(name, namespace=namespace, labels=labels, annotations=annotations),
        "addressType": family,
        "endpoints": endpoints,
        "ports": ports,
    }


def endpoint(address: str, *, node: str, target: str, **conditions: bool) -> Manifest:
    """Return an endpoint that is a Pod: ready and serving, unless ``conditions`` say otherwise."""
    return {
        "addresses": [address],
        "nodeName": node,
        "targetRef": {"kind": "Pod", "name": target},
        "conditions": {"ready": True, "serving": True, "terminating": False} | conditions,
    }


def node(
    name: str,
    *addresses: str | tuple[str, str],
    labels: dict[str, str] | None = None,
    pod_cidrs: Iterable[str] = (),
    **spec: Any,
) -> Manifest:
    """Return a Node with these internal addresses; a pair, such as ("Hostname", "node-1"), has
    another type.
    """
    pairs = [("InternalIP", each) if isinstance(each, str) else each for each in addresses]
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": _metadata(name, labels=labels),
        "spec": {"podCIDRs": list(pod_cidrs)} | spec,
        "status": {"addresses": [{"type": type, "address": text} for type, text in pairs]},
    }


def service_cidr(*networks: str, name: str = "kubernetes") -> Manifest:
    """Return a ServiceCIDR: the range of cluster IPs."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": _metadata(name),
        "spec": {"cidrs": list(networks)},
    }


def _metadata(name: str, **others: Any) -> Manifest:
    """Return the metadata, without what is empty."""
    return {"name": name} | {key: value for key, value in others.items() if value}


def text(objects: Iterable[Manifest]) -> str:
    """Return the objects as one manifest."""
    return yaml.safe_dump_all(objects, sort_keys=False)


def write(path: Path, objects: Iterable[Manifest]) -> None:
    """Replace the file by these objects in one step: no reader sees a part of it."""
    replace(path, text(objects))


def replace(path: Path, text: str) -> None:
    """Replace the file by this text in one step."""
    half = path.with_name(f".{path.name}")
    half.write_text(text)
    half.replace(path)
