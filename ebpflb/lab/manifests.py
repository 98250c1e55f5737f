# SPDX-License-Identifier: Apache-2.0
"""Services and EndpointSlices as manifests, as `kubectl get -o yaml` would show them."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]


def service(name: str, ips: list[str], ports: list[Manifest], **spec: Any) -> Manifest:
    """A Service; of both families where ``ips`` has two."""
    families = ["IPv6" if ":" in ip else "IPv4" for ip in ips]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"clusterIP": ips[0], "clusterIPs": ips, "ipFamilies": families, "ports": ports}
        | spec,
    }


def endpoint_slice(
    service: str, family: str, endpoints: list[Manifest], ports: list[Manifest]
) -> Manifest:
    """One EndpointSlice of a Service."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{service}-{family.lower()}",
            "namespace": "default",
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": family,
        "endpoints": endpoints,
        "ports": ports,
    }


def endpoint(address: str, *, node: str, target: str, **conditions: bool) -> Manifest:
    """A Pod behind a Service: ready and serving, unless ``conditions`` say otherwise."""
    return {
        "addresses": [address],
        "nodeName": node,
        "targetRef": {"kind": "Pod", "name": target},
        "conditions": {"ready": True, "serving": True, "terminating": False} | conditions,
    }


def node(name: str, *addresses: str, pod_cidrs: Iterable[str] = ()) -> Manifest:
    """A Node with these internal addresses."""
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "spec": {"podCIDRs": list(pod_cidrs)},
        "status": {"addresses": [{"type": "InternalIP", "address": ip} for ip in addresses]},
    }


def service_cidr(*networks: str) -> Manifest:
    """A ServiceCIDR: the range of cluster IPs."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": "kubernetes"},
        "spec": {"cidrs": list(networks)},
    }


def text(objects: Iterable[Manifest]) -> str:
    """The objects as one manifest."""
    return yaml.safe_dump_all(objects, sort_keys=False)


def write(path: Path, objects: Iterable[Manifest]) -> None:
    """Replaces the file in one step: a reader never sees a part of it."""
    replace(path, text(objects))


def replace(path: Path, text: str) -> None:
    """As ``write``, with the text of a manifest."""
    half = path.with_name(f".{path.name}")
    half.write_text(text)
    half.replace(path)
