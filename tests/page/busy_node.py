# SPDX-License-Identifier: Apache-2.0
"""A node as in a real cluster: 40 Services with long names, some with a problem, and clients that
connect all the time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ebpflb.lab import manifests
from ebpflb.lab.manifests import Manifest
from tests.kit.cluster import NODEPORT, PORT, VIP, Cluster, endpoint, running, web
from tests.page.browser import Page

REFUSED = "10.96.3.2"
# By the first word of the page's address: a condition of the document that shows all.
WHOLE = {
    "": "document.querySelector('.card:nth-child(3) .line') && document.querySelector('.why')",
    "services": "document.querySelector('svg.parts')",
    "service": "document.querySelector('.endpoints td') && document.querySelector('.changes td')",
    "explain": "document.querySelector('#explained')",
    "events": "document.querySelectorAll('.events tr').length > 9",
    "history": "document.querySelector('.changes td')",
    "nothing": "document.querySelector('main p')",
}
_NAMESPACES = {
    "kube-prometheus-stack": [
        "kube-prometheus-stack-alertmanager",
        "kube-prometheus-stack-prometheus-node-exporter",
    ],
    "payments-europe-west": [
        "payment-authorization-gateway-internal",
        "settlement-batch-coordinator-nightly",
        "ledger-reconciliation-read-replica-reporting-europe-w",
    ],
    "customer-identity-platform": [
        "oauth2-token-introspection-endpoint",
        "passwordless-enrollment-api-public",
    ],
}


def services() -> list[Manifest]:
    """Return 38 Services beside ``web``: most have two endpoints, the first few a problem."""
    made = _with_problems()
    names = [(space, name) for space, names in _NAMESPACES.items() for name in names]
    for number in range(38 - 2):
        space, name = names[number % len(names)]
        made += _service(space, f"{name}-{number}", number + 1)
    return made


def _service(namespace: str, name: str, number: int) -> list[Manifest]:
    ports = [{"name": "https-metrics", "port": 8443}]
    pods = [
        manifests.endpoint(f"10.250.{number}.{i}", node="node", target=f"{name}-{i}b7d9c-x{i}k2p")
        for i in (1, 2)
    ]
    return [
        manifests.service(name, [f"10.96.2.{number}"], ports, namespace=namespace),
        manifests.endpoint_slice(name, "IPv4", pods, ports, namespace=namespace),
    ]


def _with_problems() -> list[Manifest]:
    """Return a Service without endpoints, and one whose endpoints are elsewhere."""
    ports = [{"name": "grpc", "port": PORT}]
    away = manifests.endpoint("10.244.9.9", node="away", target="inventory-reservation-5c7f-kq2")
    local: dict[str, Any] = {"internalTrafficPolicy": "Local", "namespace": "warehouse-analytics"}
    first, second = "customer-notification-preferences", "inventory-reservation-coordinator"
    return [
        manifests.service(first, [REFUSED], ports, namespace="customer-identity-platform"),
        manifests.service(second, ["10.96.3.3"], ports, **local),
        manifests.endpoint_slice(second, "IPv4", [away], ports, namespace="warehouse-analytics"),
    ]


def publish(cluster: Cluster, pods: int = 3) -> None:
    """Publish many pods behind ``web``, and an endpoint of this Service that is not ready."""
    away = manifests.endpoint("10.244.9.9", node="away", target="far", ready=False)
    used = [endpoint(pod) for pod in cluster.web[:pods]]
    v6 = [endpoint(pod, v6=True) for pod in cluster.web[:pods]]
    ours = web(*used, away, v6=v6, nodeport=NODEPORT)
    cluster.publish(ours, services())


@contextmanager
def busy_node(folder: Path) -> Iterator[Cluster]:
    """Yield the node; its clients are ended, and everything is removed, afterwards."""
    with running(folder) as cluster:
        publish(cluster, 2)
        publish(cluster)
        for where, pause in ((VIP, 0.02), (cluster.node.v4, 0.1)):
            port = PORT if where == VIP else NODEPORT
            cluster.start_client(cluster.client, "tcp", where, port, pause)
        _refused(cluster)
        yield cluster


def _refused(cluster: Cluster) -> None:
    """Connect to the Service without endpoints, a few times a second, until the lab ends."""
    script = f"""
import socket, time
while True:
    try:
        socket.create_connection(({REFUSED!r}, {PORT}), 1)
    except OSError:
        time.sleep(0.3)
"""
    path = cluster.folder / "refused.py"
    path.write_text(script)
    cluster.lab.keep(cluster.client.python(path))


def settled(page: Page, where: str) -> None:
    """Wait until the page shows the values it reads, and watches events."""
    name = where.partition("?")[0].split("/")[1]
    page.wait("the verdict", lambda: page.text("#verdict") == "OK")
    if name == "events":
        page.wait("the form", lambda: page.script("return document.querySelector('#watch')"))
        page.script("document.querySelector('#watch').click()")
    page.wait(f"{where} is whole", lambda: page.script(f"return ({WHOLE[name]})"))
