# SPDX-License-Identifier: Apache-2.0
"""Small manifests; a test gives only the values that matter to it."""

from typing import Any

from ebpflb.lab import manifests
from ebpflb.lab.manifests import Manifest

PROXY_NAME = "service.kubernetes.io/service-proxy-name"
HEADLESS = "service.kubernetes.io/headless"


def service(
    name: str, *, labels: dict[str, str] | None = None, namespace: str = "default", **spec: Any
) -> Manifest:
    ports = spec.pop("ports", [{"port": 80, "targetPort": 8080}])
    return manifests.service(name, ["10.96.0.1"], ports, labels=labels, namespace=namespace, **spec)


def endpoint_slice(name: str, *addresses: str, labels: dict[str, str] | None = None) -> Manifest:
    endpoints = [manifests.endpoint(it, node="node-1", target=f"pod-{it}") for it in addresses]
    ports = [{"name": "http", "port": 8080, "protocol": "TCP"}]
    return manifests.endpoint_slice("", "IPv4", endpoints, ports, name=name, labels=labels or {})


def node(name: str, *, labels: dict[str, str] | None = None) -> Manifest:
    return manifests.node(name, "192.0.2.1", labels=labels)
