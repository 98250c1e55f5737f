# SPDX-License-Identifier: Apache-2.0
"""A fake API server with thousands of Services, a program of its own; the standard library alone.

    api_program.py NODE ADDRESS SERVICES ENDPOINTS   ENDPOINTS is that of one Service

It prints its port, then reads a JSON command per line and answers each with a JSON line:

    ["change", count, rate]   as many EndpointSlices, spread over all, evenly so many a second
    ["begin", count, rate]    the same, and answers at once
    ["move", address]         the measured Service's endpoint; answers CLOCK_MONOTONIC before

Lists and lines are the bytes that a real API server sends: with managed fields, owners, uids and
the time of the change, which are most of what an agent has to read and does not use. What takes
time is made beforehand, so that the server is not what is measured.
"""

import json
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Json = dict[str, Any]

MEASURED, ADDRESS = "measured", "10.96.0.10"  # the Service whose endpoint is moved
SERVICES, ENDPOINTS = IPv4Address("10.100.0.1"), IPv4Address("10.128.0.1")
SPARE = IPv4Address("10.200.0.1")  # of endpoints that come instead of others
PORT, TARGET, NODES = 80, 8080, 100
UID = "5a1c8f4e-0000-4000-8000-{:012x}"


def metadata(name: str, number: int, labels: Json, **more: Any) -> Json:
    fields = {"f:metadata": {"f:labels": {".": {}, **{f"f:{each}": {} for each in labels}}}}
    at = "2026-11-01T10:00:00Z"
    manager = {"manager": "kube-controller-manager", "operation": "Update", "time": at}
    return {
        "name": name,
        "namespace": "default",
        "uid": UID.format(number),
        "resourceVersion": "1",
        "generation": 1,
        "creationTimestamp": at,
        "labels": labels,
        "managedFields": [{**manager, "fieldsType": "FieldsV1", "fieldsV1": fields}],
        **more,
    }


def service(name: str, number: int, address: str) -> Json:
    port = {"name": "http", "protocol": "TCP", "port": PORT, "targetPort": TARGET}
    spec = {"clusterIP": address, "clusterIPs": [address], "ipFamilies": ["IPv4"], "ports": [port]}
    usual = {"type": "ClusterIP", "sessionAffinity": "None", "ipFamilyPolicy": "SingleStack"}
    return {
        "kind": "Service",
        "apiVersion": "v1",
        "metadata": metadata(name, number, {"app": name}),
        "spec": {**spec, **usual, "internalTrafficPolicy": "Cluster", "selector": {"app": name}},
        "status": {"loadBalancer": {}},
    }


def endpoint(address: str, name: str) -> Json:
    number = int(IPv4Address(address))
    target = {"kind": "Pod", "namespace": "default", "name": f"{name}-{number:x}"}
    return {
        "addresses": [address],
        "conditions": {"ready": True, "serving": True, "terminating": False},
        "targetRef": {**target, "uid": UID.format(number)},
        "nodeName": f"node-{number % NODES}",
        "zone": f"zone-{number % 3}",
    }


def endpoint_slice(name: str, number: int, addresses: list[str]) -> Json:
    made = metadata(
        f"{name}-x7k2p",
        number,
        {"kubernetes.io/service-name": name, "app": name},
        annotations={"endpoints.kubernetes.io/last-change-trigger-time": ""},
        ownerReferences=[{"apiVersion": "v1", "kind": "Service", "name": name, "controller": True}],
    )
    return {
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": made,
        "addressType": "IPv4",
        "endpoints": [endpoint(address, name) for address in addresses],
        "ports": [{"name": "http", "protocol": "TCP", "port": TARGET}],
    }


class Cluster:
    """The objects, and the one watch of EndpointSlices."""

    def __init__(self, node: str, address: str, services: int, endpoints: int) -> None:
        self.version, self.turn = 1, 0
        self.watch: Any = None
        self.sending = threading.Lock()
        self.addresses = {
            f"service-{i}": [str(ENDPOINTS + j) for j in range(i * endpoints, (i + 1) * endpoints)]
            for i in range(services)
        } | {MEASURED: [address]}
        self.names = list(self.addresses)
        ips = [str(SERVICES + i) for i in range(services)] + [ADDRESS]
        named = {"addresses": [{"type": "InternalIP", "address": address}]}
        cidr = metadata("kubernetes", 0, {})
        self.objects: dict[str, list[Json]] = {
            "services": [service(n, i, ips[i]) for i, n in enumerate(self.names)],
            "endpointslices": [self.slice(i) for i in range(len(self.names))],
            "nodes": [{"kind": "Node", "metadata": metadata(node, 0, {}), "status": named}],
            "servicecidrs": [{"metadata": cidr, "spec": {"cidrs": ["10.96.0.0/12"]}}],
        }

    def slice(self, number: int) -> Json:
        name = self.names[number]
        return endpoint_slice(name, number, self.addresses[name])

    def page(self, kind: str, query: dict[str, str]) -> bytes:
        begin, limit = int(query.get("continue", 0)), int(query.get("limit", 1 << 30))
        items, end = self.objects[kind], begin + limit
        following = str(end) if end < len(items) else ""
        named = {"resourceVersion": str(self.version), "continue": following}
        return json.dumps({"metadata": named, "items": items[begin:end]}).encode()

    def line(self, number: int, addresses: list[str]) -> bytes:
        """What a watch says of a slice with other addresses."""
        self.addresses[self.names[number]] = addresses
        made = self.slice(number)
        self.version += 1
        made["metadata"]["resourceVersion"] = str(self.version)
        at = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        made["metadata"]["annotations"]["endpoints.kubernetes.io/last-change-trigger-time"] = at
        return json.dumps({"type": "MODIFIED", "object": made}).encode() + b"\n"

    def change(self, count: int, rate: float) -> float:
        """Returns the seconds that it took."""
        begun = time.monotonic()
        for number in range(count):
            self.turn += 1
            which = self.turn * 7919 % (len(self.names) - 1)
            others = self.addresses[self.names[which]][1:]
            line = self.line(which, [*others, str(SPARE + self.turn % (1 << 20))])
            time.sleep(max(0.0, begun + number / rate - time.monotonic()))
            self.send(line)
        return time.monotonic() - begun

    def begin(self, count: int, rate: float) -> None:
        threading.Thread(target=self.change, args=(count, rate), daemon=True).start()

    def move(self, address: str) -> int:
        line = self.line(len(self.names) - 1, [address])
        begun = time.monotonic_ns()
        self.send(line)
        return begun

    def send(self, line: bytes) -> None:
        with self.sending:
            self.watch.write(b"%x\r\n%b\r\n" % (len(line), line))


def handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            kind, query = url.path.rpartition("/")[2], dict(parse_qsl(url.query))
            if "watch" in query:
                self.follow(kind)
            else:
                self.answer(200, cluster.page(kind, query))

        def do_POST(self) -> None:
            self.answer(201, self.rfile.read(int(self.headers["Content-Length"])))

        def answer(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def follow(self, kind: str) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            if kind == "endpointslices":
                cluster.watch = self.wfile
            threading.Event().wait()

        def log_message(self, *_: object) -> None:
            """Nobody looks."""

    return Handler


def main() -> None:
    node, address, services, endpoints = sys.argv[1:]
    cluster = Cluster(node, address, int(services), int(endpoints))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(cluster))
    server.daemon_threads = True
    threading.excepthook = lambda _: None  # the agent has ended
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps(server.server_port), flush=True)
    for command in sys.stdin:
        what, *arguments = json.loads(command)
        print(json.dumps(getattr(cluster, what)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
