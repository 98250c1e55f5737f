# SPDX-License-Identifier: Apache-2.0
"""One node of the lab, whose pods answer with their names on port TARGET of TCP and UDP."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import AF_INET, AF_INET6, SOCK_DGRAM, SOCK_STREAM
from typing import Any

from ebpflb.lab import cni, manifests
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.manifests import Manifest
from ebpflb.model.packet_path import Engine
from tests.kit.lab_cluster import NODEPORT as NODEPORT
from tests.kit.lab_cluster import PORT, TARGET, LabCluster, started
from tests.kit.sockets import Socket

VIP, VIP6 = "10.96.0.10", "fd00:96::10"
EXTERNAL, BALANCER = "203.0.113.10", "203.0.113.20"


class Cluster(LabCluster):
    """A ``node`` with the pods ``client`` and ``web-1`` to ``web-3``."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        *options: str,
        engine: Engine | None = None,
        network: cni.Cni | None = None,
    ) -> None:
        super().__init__(lab, folder)
        self.engine = engine or self.engine
        self.network = network or cni.Bridge()
        self.node = lab.node("node", 1, self.network)
        self.client = lab.pod(self.node, "client", 2)
        self.web = [lab.pod(self.node, f"web-{i}", 10 + i) for i in range(1, 4)]
        self.agent = self.add_agent(self.node, *options)
        for pod in self.web:
            self.start_program(pod, "serve", pod.name, str(TARGET))


class ServingOutside(Cluster):
    """A cluster with a client "outside", which connects to the node's NodePort."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        *options: str,
        engine: Engine | None = None,
        network: cni.Cni | None = None,
    ) -> None:
        super().__init__(lab, folder, *options, engine=engine, network=network)
        self.outside = lab.outside("outside", 1)

    def serve(self, *pods: Host) -> None:
        """Make these pods the endpoints, in both families."""
        v6 = [endpoint(pod, v6=True) for pod in pods]
        self.publish(web(*map(endpoint, pods), v6=v6, nodeport=NODEPORT))

    def connection(
        self, kind: int = SOCK_STREAM, *, v6: bool = False, port: int = NODEPORT
    ) -> Socket:
        """Return a socket of the client, connected to the NodePort, after one answer."""
        client = self.sockets(self.outside).open(AF_INET6 if v6 else AF_INET, kind)
        client.connect((self.node.v6 if v6 else self.node.v4, port))
        if kind == SOCK_DGRAM:
            client.send(b"?")
        assert client.recv(64)
        return client


@contextmanager
def running(folder: Path, *options: str, engine: Engine | None = None) -> Iterator[Cluster]:
    """Yield a cluster whose agent runs; everything is removed afterwards."""
    with started(lambda lab: Cluster(lab, folder, *options, engine=engine)) as cluster:
        yield cluster


@contextmanager
def serving_outside(
    folder: Path, engine: Engine, *options: str, network: cni.Cni | None = None
) -> Iterator[ServingOutside]:
    """Yield a ServingOutside like ``running`` does; all pods are endpoints."""
    with started(
        lambda lab: ServingOutside(lab, folder, *options, engine=engine, network=network)
    ) as cluster:
        cluster.serve(*cluster.web)
        yield cluster


def endpoint(
    pod: Host,
    *,
    v6: bool = False,
    node: str = "node",
    zones: Iterable[str] = (),
    **conditions: bool,
) -> Manifest:
    found = manifests.endpoint(pod.v6 if v6 else pod.v4, node=node, target=pod.name, **conditions)
    hints = {"hints": {"forZones": [{"name": zone} for zone in zones]}} if zones else {}
    return found | hints


def web(
    *endpoints: Manifest, v6: Iterable[Manifest] = (), nodeport: int | None = None, **spec: Any
) -> list[Manifest]:
    """Return the Service default/web on PORT for TCP and UDP, with slices of both families."""
    named = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in ("tcp", "udp")]
    ports: list[Manifest] = [{**port, "port": PORT} for port in named]
    if nodeport:
        spec = {"type": "NodePort"} | spec
        ports = [{**port, "nodePort": nodeport} for port in ports]
    return [
        manifests.service("web", [VIP, VIP6], ports, **spec),
        manifests.endpoint_slice("web", "IPv4", list(endpoints), named),
        manifests.endpoint_slice("web", "IPv6", list(v6), named),
    ]
