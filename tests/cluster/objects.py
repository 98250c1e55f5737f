# SPDX-License-Identifier: Apache-2.0
"""Objects as the API would serve them, small ones."""

from typing import Any

PROXY_NAME = "service.kubernetes.io/service-proxy-name"
HEADLESS = "service.kubernetes.io/headless"


def service(
    name: str, *, labels: dict[str, str] | None = None, namespace: str = "default", **spec: Any
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, "labels": labels or {}},
        "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80, "targetPort": 8080}]} | spec,
    }


def endpoint_slice(
    name: str, *addresses: str, labels: dict[str, str] | None = None
) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "default", "labels": labels or {}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": 8080, "protocol": "TCP"}],
        "endpoints": [
            {"addresses": [address], "conditions": {"ready": True}, "nodeName": "node-1"}
            for address in addresses
        ],
    }


def service_cidr(name: str, *cidrs: str) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": {"name": name},
        "spec": {"cidrs": list(cidrs)},
    }


def node(name: str, *, labels: dict[str, str] | None = None) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels or {}},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]},
    }
