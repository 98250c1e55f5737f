# SPDX-License-Identifier: Apache-2.0
"""As much of an API server as kubectl asks for a dry run: which kinds there are, and no objects."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

RESOURCES = {
    "/apis/monitoring.coreos.com/v1": {
        "podmonitors": "PodMonitor",
        "prometheusrules": "PrometheusRule",
    },
    "/api/v1": {"configmaps": "ConfigMap", "serviceaccounts": "ServiceAccount"},
    "/apis/apps/v1": {"daemonsets": "DaemonSet"},
    "/apis/rbac.authorization.k8s.io/v1": {
        "clusterroles": "ClusterRole",
        "clusterrolebindings": "ClusterRoleBinding",
    },
}
_VERBS = ["create", "get", "list", "patch"]


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
            "namespaced": not kind.startswith("Cluster"),
            "verbs": _VERBS,
        }
        for name, kind in RESOURCES[path].items()
    ]


def answer(path: str) -> dict[str, Any]:
    """A document, or a Status where there is none."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": _groups()}
    if path in RESOURCES:
        version = path.removeprefix("/apis/").removeprefix("/api/")
        found = {"groupVersion": version, "resources": _resources(path)}
        return {"kind": "APIResourceList", "apiVersion": "v1", **found}
    words = {"reason": "NotFound", "code": 404, "message": f"{path} is not here"}
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", **words}


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        said = answer(self.path.partition("?")[0])
        body = json.dumps(said).encode()
        self.send_response(said.get("code", 200))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """kubectl says what goes wrong."""


@contextmanager
def serving(folder: Path) -> Iterator[Path]:
    """A kubeconfig for it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = {"cluster": {"server": f"http://127.0.0.1:{server.server_port}"}, "name": "it"}
    context = {"context": {"cluster": "it", "user": "me"}, "name": "it"}
    said = {"clusters": [here], "contexts": [context], "users": [{"name": "me", "user": {}}]}
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump({"kind": "Config", "current-context": "it", **said}))
    try:
        yield path
    finally:
        server.shutdown()
        server.server_close()
