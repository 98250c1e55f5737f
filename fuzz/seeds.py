# SPDX-License-Identifier: Apache-2.0
"""Writes the seeds of all targets into fuzz/corpus: python -m fuzz.seeds."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from ebpflb.lab import manifests
from tests.packet.errors import KINDS as ERRORS
from tests.packet.errors import error
from tests.packet.frames import Packet, at, fragments, opening, reply, segment
from tests.packet.places import V4, V6, Places
from tests.packet.services import address

FOLDER = Path(__file__).with_name("corpus")
# The node's state: the settings' flags detect_local and netfilter, and the gate (packet.c).
FLOWS, NETFILTER, NO_FLOWS = (8, 2), (8 | 32, 2), (8 | 32, 3)
WHOLE, INGRESS, EGRESS = 255, 2, 5


def written(state: tuple[int, int], *packets: tuple[int, Packet]) -> bytes:
    """Return an input: the node's state, and each packet with its head (packet.c, struct head)."""
    parts = [(hook, bytes(packet)) for hook, packet in packets]
    return struct.pack("=HBx", *state) + b"".join(
        struct.pack("=BBH", hook, WHOLE, len(frame)) + frame for hook, frame in parts
    )


def seeds(places: Places) -> Iterator[tuple[str, bytes]]:
    version, client = places.version, at(places.client, 50123)
    for protocol in ("tcp", "udp", "sctp"):
        first = opening(protocol, client, address(places, "cluster"))
        answer = opening(protocol, at(places.there, 8080), client)
        kinds = {"flows": FLOWS, "netfilter": NETFILTER, "no-flows": NO_FLOWS}
        for name, state in kinds.items():
            yield f"{protocol}{version}-{name}", written(state, (0, first), (EGRESS, answer))
    pieces = fragments(client, address(places, "nodeport"))
    yield f"fragments{version}", written(FLOWS, *((0, piece) for piece in pieces))
    sent = segment(client, address(places, "cluster"))
    for kind in ERRORS:
        about = error(kind, places.router, reply(sent))
        name = f"{kind.replace(' ', '-')}{version}"
        yield name, written(FLOWS, (0, sent), (0, about), (EGRESS, about))


PORT = {"name": "http", "port": 80, "protocol": "TCP", "nodePort": 30080}
SERVICE = manifests.service(
    "web", ["10.96.0.10", "fd00:96::10"], [PORT], type="LoadBalancer", sessionAffinity="ClientIP",
    externalIPs=["203.0.113.10"], loadBalancerSourceRanges=["198.51.100.0/24"],
    externalTrafficPolicy="Local",
)  # fmt: skip
SLICE = manifests.endpoint_slice(
    "web", "IPv4", [manifests.endpoint("10.244.1.11", node="node", target="web-1", ready=True)],
    [{"name": "http", "port": 8080, "protocol": "TCP"}],
)  # fmt: skip
CONFIG = """apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clusterCIDR: 10.244.0.0/16,fd00:10:244::/56
conntrack: {maxPerCore: 32768, tcpEstablishedTimeout: 24h0m0s}
detectLocal: {bridgeInterface: cni0}
iptables: {syncPeriod: 30s}
mode: ipvs
ipvs: {scheduler: rr}
nodePortAddresses: [192.0.2.0/24]
"""
KUBECONFIG = """clusters:
- {name: a, cluster: {server: "https://a:6443", certificate-authority-data: YQ==}}
users: [{name: a, user: {token: secret, exec: {command: a, env: [{name: b, value: c}]}}}]
contexts: [{name: a, context: {cluster: a, user: a}}]
current-context: a
"""
OPTIONS = """--cluster-cidr=10.244.0.0/16
--map-size
flows=70000,slots=4096
--packet-path=flows
--api-server=192.0.2.1:6443
--nodeport-addresses=primary
--service-metrics=200,metrics=on
--v=2
--feature-gates=A=true
--conntrack-tcp-timeout-established=1h
"""
LIST = {"metadata": {"resourceVersion": "1"}, "items": [SERVICE, SLICE]}
TEXTS = {
    "service": json.dumps(SERVICE),
    "endpoint_slice": json.dumps(SLICE),
    "watch": json.dumps({"type": "MODIFIED", "object": SLICE}),
    "watch/list": json.dumps(LIST),
    "manifest": manifests.text([SERVICE, SLICE]),
    "manifest/json": json.dumps({"apiVersion": "v1", "kind": "List", "items": [SERVICE, SLICE]}),
    "config": CONFIG,
    "kubeconfig_file": KUBECONFIG,
    "options": OPTIONS,
}


def main() -> None:
    for each in (V4, V6):
        for name, content in seeds(each):
            _write("packet", name, content)
    for where, text in TEXTS.items():
        target, _, name = where.partition("/")
        _write(target, name or "usual", text.encode())
    for target in ("conntrack_entry", "device"):
        _write(target, "bytes", bytes(range(256)))


def _write(target: str, name: str, content: bytes) -> None:
    (FOLDER / target).mkdir(parents=True, exist_ok=True)
    (FOLDER / target / name).write_bytes(content)


if __name__ == "__main__":
    main()
