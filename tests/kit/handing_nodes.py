# SPDX-License-Identifier: Apache-2.0
"""Three nodes that hand requests over by MAC address (docs/client-addresses.md).

one, two, three  nodes with an agent, and a pod each that answers
outside          a client beyond the router, which leads service addresses to node one
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ebpflb.lab import cni, manifests, traffic
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.manifests import Manifest
from ebpflb.model.annotations import FORWARDING_ANNOTATION
from ebpflb.model.packet_path import Engine
from tests.kit import believed_hops, requests
from tests.kit.forked import ForkedAgent
from tests.kit.lab_cluster import PORT, TARGET, LabCluster
from tests.kit.pod_networks import Routed

NAMES = ("one", "two", "three")
LOCAL, KEEP = ("203.0.113.10", "fd03:113::10"), ("203.0.113.20", "fd03:113::20")
OPTIONS = "--hand-over=auto", "--cluster-cidr", ",".join(cni.NETWORKS)


class ThreeNodes(LabCluster):
    """The nodes, which a test tells whom to hand to."""

    def __init__(self, lab: Lab, folder: Path, engine: Engine) -> None:
        super().__init__(lab, folder)
        self.engine = engine
        self.nodes = [lab.node(name, number, Routed()) for number, name in enumerate(NAMES, 1)]
        for one, other in zip(self.nodes, (*self.nodes[1:], self.nodes[0]), strict=True):
            lab.join(one, other)
        self.pods = {it.name: lab.pod(it, f"pod-{it.name}", 11) for it in self.nodes}
        self.outside = lab.outside("outside", 1)
        for pod in self.pods.values():
            self.start_program(pod, "serve", pod.name, str(TARGET))
        for node in self.nodes:
            for device in ("all", "eth0"):
                node.sysctl(f"net.ipv4.conf.{device}.rp_filter", 1)  # strict
            agent = ForkedAgent(lab, node, folder, *OPTIONS)
            agent.before = believed_hops.__name__, str(agent.folder / "hops")
            agent.defaults = (f"--packet-path={engine}",)
            self.agents.append(agent)
        self.lead("one")

    def start(self) -> None:
        self.believe({name: set(NAMES) for name in NAMES})
        super().start()

    def believe(self, among: dict[str, set[str]]) -> None:
        """Say of each node which others it may hand to."""
        known = [{"node": it.name, "v4": it.v4, "v6": it.v6, "mac": _mac(it)} for it in self.nodes]
        for agent in self.agents:
            name = agent.node.name
            others = [it for it in known if it["node"] != name]
            said = [{**it, "believed": it["node"] in among[name]} for it in others]
            manifests.replace(agent.folder / "hops", json.dumps(said))

    def lead(self, node: str) -> None:
        """Let the router lead service addresses to this node."""
        host = self.nodes[NAMES.index(node)]
        for network, gateway in (("203.0.113.0/24", host.v4), ("fd03:113::/64", host.v6)):
            self.lab.router.lead(network, gateway)
            self.lab.router.ip(f"route replace {network} via {gateway}")  # the router's own errors

    def service(
        self,
        name: str,
        number: int,
        addresses: tuple[str, str],
        among: Sequence[str],
        annotations: dict[str, str] | None = None,
        **spec: Any,
    ) -> list[Manifest]:
        named = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in ("tcp", "udp")]
        ports = [{**port, "port": PORT} for port in named]
        ips = [f"10.96.0.{number}", f"fd00:96::{number}"]
        kind: dict[str, Any] = {"type": "LoadBalancer", "ingress": addresses, **spec}
        slices = [
            manifests.endpoint_slice(
                name,
                f"IP{family}",
                [
                    manifests.endpoint(
                        getattr(self.pods[node], family), node=node, target=self.pods[node].name
                    )
                    for node in among
                ],
                named,
            )
            for family in ("v4", "v6")
        ]
        return [manifests.service(name, ips, ports, annotations=annotations, **kind), *slices]

    def local(self, *among: str, **spec: Any) -> list[Manifest]:
        return self.service("local", 1, LOCAL, among, externalTrafficPolicy="Local", **spec)

    def keep(self, *among: str) -> list[Manifest]:
        """At external addresses."""
        spec: dict[str, Any] = {"ingress": (), "externalIPs": [*KEEP]}
        annotations = {FORWARDING_ANNOTATION: "keep-client"}
        return self.service("keep", 2, KEEP, among, annotations, **spec)

    def sees(self, address: str) -> str:
        """The endpoint that answers, and the client's address there; "" if none does soon."""
        with requests.tcp_socket(self.sockets(self.outside), address) as client:
            client.settimeout(1)
            try:
                client.connect((address, PORT))
                name, source = traffic.read(client.recv(64))
            except OSError:
                return ""
            return f"{name} {source}"

    def sees_client(self, address: str, client: str) -> bool:
        return self.sees(address).endswith(f" {client}")

    def tracked(self, node: str, address: str) -> list[str]:
        """The states of TCP connections to an address in a node's conntrack."""
        host = self.nodes[NAMES.index(node)]
        done = subprocess.run(
            [*host.enter, "conntrack", "-L", "-p", "tcp", "--orig-dst", address],
            capture_output=True,
            text=True,
        )
        return done.stdout.splitlines()


def _mac(host: Host) -> str:
    words = [*host.enter, "ip", "-json", "link", "show", "eth0"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    mac: str = json.loads(done.stdout)[0]["address"]
    return mac
