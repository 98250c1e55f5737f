# SPDX-License-Identifier: Apache-2.0
"""A node that an agent and kube-proxy's rules serve; each serves the same two Services.

The rules are those of a kube-proxy that runs beside the agent. They lead to web-3, the manifests to
web-1 and web-2, so the answer tells who has served a request. Clients ask in both families.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from bench import kubeproxy
from bench.services import CIDR, CIDR6, NodePort
from ebpflb.lab import cni, manifests
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.annotations import ON_REMOVAL_ANNOTATION
from ebpflb.model.packet_path import Engine
from tests.kit import needs, requests
from tests.kit.cluster import Cluster, endpoint
from tests.kit.lab_cluster import PORT, TARGET, new_lab
from tests.kit.sockets import Socket, Sockets
from tests.load import LOAD, scaled

PODS, PODS6 = cni.NETWORKS
NEW, OLD = ("new", "10.96.0.10", 30080), ("old", "10.96.0.11", 30081)
LABELS = {"stage": "canary"}
EBPFLB, KUBE_PROXY = {"web-1", "web-2"}, {"web-3"}
LEAST, MOST = max(4, scaled(20)), 40  # requests of a client until all endpoints have answered
PAUSE = 0.01 if LOAD == 1 else 0.5  # seconds between a client's connections
_ports = cycle(range(10_000, 30_000))


def udp(sockets: Sockets, host: str, port: int = PORT) -> requests.Answer:
    """Ask from an unused port, because an earlier request's flow keeps its backend."""
    with requests.udp_socket(sockets, host) as client:
        client.bind(("::" if ":" in host else "0.0.0.0", next(_ports)))
        return requests.exchange(client, host, port)


def v6_of(address: str) -> str:
    """Return the IPv6 cluster IP of the Service with this IPv4 cluster IP."""
    return f"fd00:96::{address.rpartition('.')[2]}"


class Both(Cluster):
    """The node, whose agent is not started yet."""

    def __init__(self, lab: Lab, folder: Path, engine: Engine) -> None:
        pods = ("--cluster-cidr", f"{PODS},{PODS6}")
        super().__init__(lab, folder, *pods, f"--packet-path={engine}")
        self.chosen = self.agent.options
        self.unhooked = lab.pod(self.node, "unhooked", 3, hooked=False)
        self.outside = lab.outside("outside", 1)
        self.node.nft(kubeproxy.nft(self._by_rules(v6=False), "node", self.node.v4, PODS))
        self.node.nft(kubeproxy.nft(self._by_rules(v6=True), "node", self.node.v6, PODS6))
        cidr = manifests.service_cidr(CIDR, CIDR6)
        self.write(cidr, self.service(*NEW, labels=LABELS), self.service(*OLD))

    def _by_rules(self, *, v6: bool) -> list[NodePort]:
        to = ((self.web[2].v6 if v6 else self.web[2].v4, "node"),)
        return [
            NodePort(name, v6_of(address) if v6 else address, nodeport, ("tcp", "udp"), to)
            for name, address, nodeport in (NEW, OLD)
        ]

    def service(
        self,
        name: str,
        address: str,
        nodeport: int,
        endpoints: Sequence[Host] | None = None,
        **more: Any,
    ) -> list[Any]:
        """Return a Service in a namespace with the same name, with web-1 and web-2 unless
        ``endpoints`` are given. Web-3 is listed as not ready, so no connection is reset when a
        Service moves to the other proxy, or back.
        """
        named = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in ("tcp", "udp")]
        ports = [{**port, "port": PORT, "nodePort": nodeport} for port in named]
        more["annotations"] = {ON_REMOVAL_ANNOTATION: "reset=0s"}
        pods, ips = self.web[:2] if endpoints is None else endpoints, [address, v6_of(address)]
        v4, v6 = (
            [endpoint(pod, v6=v6, ready=pod != self.web[2]) for pod in (*pods, self.web[2])]
            for v6 in (False, True)
        )
        return [
            manifests.service(name, ips, ports, namespace=name, type="NodePort", **more),
            manifests.endpoint_slice(name, "IPv4", v4, named, namespace=name),
            manifests.endpoint_slice(name, "IPv6", v6, named, namespace=name),
        ]

    def serve(self, *options: str) -> None:
        """Run the agent with these options from now on."""
        self.agent.stop()
        self.agent.options = (*self.chosen, *options)
        self.agent.start()

    def ways(self, service: tuple[str, str, int]) -> list[tuple[Host, tuple[str, int]]]:
        """Return clients, each with its frontend; the other Service swaps the families."""
        _, v4, nodeport = service
        v6 = v6_of(v4)
        ips = (v6, v4, v6) if service == NEW else (v4, v6, v4)
        node = self.node.v4 if service == NEW else self.node.v6
        inside = zip((self.client, self.unhooked, self.node), ips, strict=True)
        return [(self.outside, (node, nodeport)), *((host, (ip, PORT)) for host, ip in inside)]

    def answers(
        self, service: tuple[str, str, int], send: requests.Send, wanted: set[str] = EBPFLB
    ) -> list[set[str]]:
        """Return the backends that answer each client. A client sends at least LEAST requests, and
        goes on until all of ``wanted`` have answered.
        """
        return [
            self._answering(self.sockets(host), where, send, wanted)
            for host, where in self.ways(service)
        ]

    def _answering(
        self, sockets: Sockets, where: tuple[str, int], send: requests.Send, wanted: set[str]
    ) -> set[str]:
        found = set[str]()
        for number in range(MOST):
            if number >= LEAST and found >= wanted:
                break
            found.add(send(sockets, *where).name)
        return found

    def go_through(self, steps: Sequence[tuple[Sequence[str], set[str], set[str]]]) -> None:
        """Run the agent with the options of each step in turn; ``NEW`` and ``OLD`` are then
        answered by these endpoints. No connection fails or ends, whichever proxy opened it in
        whichever step.
        """
        self.serve(*steps[0][0])
        ways = self.ways(NEW) + self.ways(OLD)
        pressing = [self.start_client(host, "tcp", *where, pause=PAUSE) for host, where in ways]
        clients: list[Socket] = []
        for number, (options, new, old) in enumerate(steps):
            if number:
                self.serve(*options)
            for send in (requests.tcp, udp):
                found = self.answers(NEW, send, new), self.answers(OLD, send, old)
                assert found == ([new] * 4, [old] * 4), (options, send.__name__, found)
            clients += [self.connected(host, where) for host, where in ways]
            for client in clients:
                client.send(b"still there")
                assert client.recv(64) == b"still there"
        counts = [self.stop_client(each) for each in pressing]
        assert [count["errors"] for count in counts] == [{}] * len(counts)

    def connected(self, host: Host, where: tuple[str, int]) -> Socket:
        client = requests.tcp_socket(self.sockets(host), where[0])
        client.connect(where)
        assert client.recv(64).split()[0].decode() in EBPFLB | KUBE_PROXY
        return client


@contextmanager
def running(folder: Path, engine: Engine) -> Iterator[Both]:
    """Yield the node; everything is removed afterwards. Skips an engine that this kernel lacks."""
    if engine is Engine.NETFILTER:
        needs.netfilter()
    with new_lab() as lab:
        made = Both(lab, folder, engine)
        try:
            yield made
        finally:
            made.close()
