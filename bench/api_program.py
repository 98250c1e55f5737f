# SPDX-License-Identifier: Apache-2.0
"""A fake API server with thousands of Services, a program of its own; the standard library alone.

    api_program.py NODE ADDRESS SIZES   SIZES: [[services, endpoints of each], ...]

It prints its port, then reads a JSON command per line and answers each with a JSON line:

    ["change", count, rate]   replaces COUNT pods of all Services, RATE per second
    ["begin", count, rate]    the same, and answers at once
    ["move", address]         the measured Service's endpoint; answers CLOCK_MONOTONIC before
    ["move", address, N]      the same, after a change of an endpoint of the Nth Service
    ["load"]                  its own: open watches of EndpointSlices, bytes sent, processor seconds

A pod is replaced by one change of its EndpointSlice, which is written at the time that the slice's
annotation says, to the microsecond. Any number of clients may watch.

Lists and lines are the bytes that a real API server sends: with managed fields, owners, uids and
the time of the change, which are most of what an agent has to read and does not use. What takes
time is made beforehand, so that the server is not what is measured.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from typing import Any
from urllib.parse import parse_qsl, urlsplit

Json = dict[str, Any]

MEASURED, ADDRESS = "measured", "10.96.0.10"  # the Service whose endpoint is moved
SERVICES, ENDPOINTS = IPv4Address("10.100.0.1"), IPv4Address("10.128.0.1")
SPARE = IPv4Address("10.200.0.1")  # of endpoints that come instead of others
PORT, TARGET, NODES = 80, 8080, 100
BOOKMARKS = 60.0  # seconds between two of a watch
SLICE = 100  # endpoints of an EndpointSlice, as the controller has them
UID = "5a1c8f4e-0000-4000-8000-{:012x}"
TRIGGER = "endpoints.kubernetes.io/last-change-trigger-time"
UNTIMED = f'"{TRIGGER}": "'.encode()


def metadata(name: str, number: int, labels: Json, **more: Any) -> Json:
    fields: Json = {"f:metadata": {"f:labels": {".": {}, **{f"f:{each}": {} for each in labels}}}}
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
        f"{name}-{number:05x}",
        number,
        {"kubernetes.io/service-name": name, "app": name},
        annotations={TRIGGER: ""},
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


def divided(counts: list[int]) -> Iterator[tuple[str, list[str]]]:
    """Return the names of Services, and the addresses of each of their slices."""
    first = 0
    for number, count in enumerate(counts):
        for begin in range(first, first + count, SLICE):
            end = min(begin + SLICE, first + count)
            yield f"service-{number}", [str(ENDPOINTS + i) for i in range(begin, end)]
        first += count


class Cluster:
    """The objects, and the watches of EndpointSlices."""

    def __init__(self, node: str, address: str, sizes: list[list[int]]) -> None:
        self.version, self.turn, self.sent = 1, 0, 0
        self.watches: list[Any] = []
        self.sending = threading.Lock()
        counts = [endpoints for services, endpoints in sizes for _ in range(services)]
        names = [f"service-{i}" for i in range(len(counts))] + [MEASURED]
        ips = [str(SERVICES + i) for i in range(len(counts))] + [ADDRESS]
        self.slices = [*divided(counts), (MEASURED, [address])]
        self.last = {name: number for number, (name, _) in enumerate(self.slices)}
        of_slices = enumerate(self.slices[:-1])
        self.pods = [number for number, (_, pods) in of_slices for _ in pods]  # each one's slice
        named = {"addresses": [{"type": "InternalIP", "address": address}]}
        cidr = metadata("kubernetes", 0, {})
        self.objects: dict[str, list[Json]] = {
            "services": [service(n, i, ips[i]) for i, n in enumerate(names)],
            "endpointslices": [self.slice(i) for i in range(len(self.slices))],
            "nodes": [
                {"kind": "Node", "apiVersion": "v1", "metadata": metadata(node, 0, {})}
                | {"spec": {}, "status": named}
            ],
            "servicecidrs": [
                {"kind": "ServiceCIDR", "apiVersion": "networking.k8s.io/v1", "metadata": cidr}
                | {"spec": {"cidrs": ["10.96.0.0/12"]}}
            ],
        }

    def slice(self, number: int) -> Json:
        name, addresses = self.slices[number]
        return endpoint_slice(name, number, addresses)

    def page(self, kind: str, query: dict[str, str]) -> bytes:
        begin, limit = int(query.get("continue", 0)), int(query.get("limit", 1 << 30))
        return self._page(kind, begin, begin + limit, self.version)

    @cache  # noqa: B019
    def _page(self, kind: str, begin: int, end: int, version: int) -> bytes:
        items = self.objects[kind]
        following = str(end) if end < len(items) else ""
        named = {"resourceVersion": str(version), "continue": following}
        return json.dumps({"metadata": named, "items": items[begin:end]}).encode()

    def line(self, number: int, addresses: list[str]) -> bytes:
        """Return a watch's line about a slice with other addresses."""
        self.slices[number] = self.slices[number][0], addresses
        made = self.slice(number)
        self.version += 1
        made["metadata"]["resourceVersion"] = str(self.version)
        return json.dumps({"type": "MODIFIED", "object": made}).encode() + b"\n"

    def change(self, count: int, rate: float) -> float:
        """Make the changes; return the seconds that they took."""
        begun = time.monotonic()
        for number in range(count):
            line = self.changed(self.pods[(self.turn + 1) * 7919 % len(self.pods)])
            time.sleep(max(0.0, begun + number / rate - time.monotonic()))
            self.send(line)
        return time.monotonic() - begun

    def changed(self, which: int) -> bytes:
        """Replace one endpoint of a slice by another."""
        self.turn += 1
        others = self.slices[which][1][1:]
        return self.line(which, [*others, str(SPARE + self.turn % (1 << 20))])

    def begin(self, count: int, rate: float) -> None:
        threading.Thread(target=self.change, args=(count, rate), daemon=True).start()

    def move(self, address: str, after: int | None = None) -> int:
        before = b"" if after is None else self.changed(self.last[f"service-{after}"])
        line = self.line(len(self.slices) - 1, [address])
        begun = time.monotonic_ns()
        self.send(before + line)
        return begun

    def follow(self, kind: str, watch: Any) -> None:
        """Send changes until the client has ended."""
        if kind == "endpointslices":
            with self.sending:
                self.watches.append(watch)
        time.sleep(BOOKMARKS)
        while self.bookmark(kind, watch):
            time.sleep(BOOKMARKS)

    def bookmark(self, kind: str, watch: Any) -> bool:
        """Send a bookmark; return False if the client has ended."""
        like = self.objects[kind][0]
        named = {name: like[name] for name in ("kind", "apiVersion")}
        named["metadata"] = {"resourceVersion": str(self.version)}
        line = json.dumps({"type": "BOOKMARK", "object": named}).encode() + b"\n"
        with self.sending:
            self.sent += len(line)
            return is_written(watch, chunk_of(line))

    def send(self, line: bytes) -> None:
        now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
        line = line.replace(UNTIMED, UNTIMED + now.encode())
        chunk = chunk_of(line)
        with self.sending:
            self.watches = [watch for watch in self.watches if is_written(watch, chunk)]
            self.sent += len(self.watches) * len(chunk)

    def load(self) -> tuple[int, int, float]:
        return len(self.watches), self.sent, time.process_time()


def chunk_of(line: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(line), line)


def is_written(watch: Any, chunk: bytes) -> bool:
    """Write; return False if the client has ended."""
    try:
        watch.write(chunk)
    except OSError:
        return False
    return True


def handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            kind, query = url.path.rpartition("/")[2], dict(parse_qsl(url.query))
            if "watch" in query:
                self.follow(kind)
            elif kind in cluster.objects:
                self.answer(200, cluster.page(kind, query))
            else:  # the Node by its name
                self.answer(200, json.dumps(cluster.objects["nodes"][0]).encode())

        def do_POST(self) -> None:
            self.answer(201, self.rfile.read(int(self.headers["Content-Length"])))

        def answer(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            with cluster.sending:
                cluster.sent += len(body)

        def follow(self, kind: str) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            cluster.follow(kind, self.wfile)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 4096  # of agents that start at once


def main() -> None:
    node, address, sizes = sys.argv[1:]
    cluster = Cluster(node, address, json.loads(sizes))
    server = Server(("127.0.0.1", 0), handler(cluster))
    threading.excepthook = lambda _: None  # the agent has ended
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps(server.server_port), flush=True)
    for command in sys.stdin:
        what, *arguments = json.loads(command)
        print(json.dumps(getattr(cluster, what)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
