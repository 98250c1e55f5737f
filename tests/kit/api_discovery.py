# SPDX-License-Identifier: Apache-2.0
"""The resources of the fake API server, and how it lists them to kubectl.

Objects of OBJECT_PATHS can be listed and watched; the other kinds are only named, which is enough
for a dry run.
"""

from typing import Any

RESOURCES = {
    "/api/v1": {
        "configmaps": "ConfigMap",
        "namespaces": "Namespace",
        "nodes": "Node",
        "secrets": "Secret",
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
    },
    "/apis/apps/v1": {"daemonsets": "DaemonSet"},
    "/apis/discovery.k8s.io/v1": {"endpointslices": "EndpointSlice"},
    "/apis/monitoring.coreos.com/v1": {
        "podmonitors": "PodMonitor",
        "prometheusrules": "PrometheusRule",
    },
    "/apis/networking.k8s.io/v1": {"servicecidrs": "ServiceCIDR"},
    "/apis/rbac.authorization.k8s.io/v1": {
        "clusterroles": "ClusterRole",
        "clusterrolebindings": "ClusterRoleBinding",
    },
}
OBJECT_PATHS = {
    kind: f"{group}/{name}"
    for group, resources in RESOURCES.items()
    for name, kind in resources.items()
    if kind in ("Service", "EndpointSlice", "Namespace", "Node", "ServiceCIDR")
}
_WITHOUT_NAMESPACE = {"Namespace", "Node", "ServiceCIDR", "ClusterRole", "ClusterRoleBinding"}
_VERBS = ["create", "get", "list", "patch", "watch"]


def document(path: str) -> dict[str, Any] | None:
    """Return the discovery document at this path, or None."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups()}
    if path in RESOURCES:
        version = path.removeprefix("/apis/").removeprefix("/api/")
        found = {"groupVersion": version, "resources": _resources(path)}
        return {"kind": "APIResourceList", "apiVersion": "v1", **found}
    return None


def _groups() -> list[dict[str, Any]]:
    names = [path.split("/")[2] for path in RESOURCES if path.startswith("/apis/")]
    versions = [{"groupVersion": f"{name}/v1", "version": "v1"} for name in names]
    return [
        {"name": name, "versions": [version], "preferredVersion": version}
        for name, version in zip(names, versions, strict=True)
    ]


def _resources(path: str) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "singularName": "",
            "kind": kind,
            "namespaced": kind not in _WITHOUT_NAMESPACE,
            "verbs": _VERBS,
        }
        for name, kind in RESOURCES[path].items()
    ]
