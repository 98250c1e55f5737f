# SPDX-License-Identifier: Apache-2.0
"""A node that kube-proxy has served in mode ipvs, and another node, ``far``, with an endpoint.

The Service ``web`` has the traffic policy Cluster: clients outside are masqueraded. ``near`` has
the policy Local, and only endpoints on the node. kube-proxy runs nowhere: its rules, sets, servers,
device and sysctls are made by hand.
"""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench import kubeproxy
from bench.services import NodePort
from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.kube_proxy import IPVS_SYSCTLS
from ebpflb.model.packet_path import Engine
from tests.kit import needs
from tests.kit.cluster import NODEPORT, PORT, TARGET, VIP, VIP6, endpoint, web
from tests.kit.kube_proxy_node import NAMES, PODS, PODS6, KubeProxyNode, Way
from tests.kit.lab_cluster import new_lab

NEAR, NEAR6, NEAR_NODEPORT = "10.96.0.11", "fd00:96::11", 30081
PROTOCOLS = ("tcp", "udp")


class _Family(NamedTuple):
    """What differs between the families."""

    v6: bool
    tool: str
    sets: str
    pods: str
    length: int

    def of(self, host: Host) -> str:
        return host.v6 if self.v6 else host.v4


FAMILIES = (
    _Family(False, "iptables-nft", "KUBE-", PODS, 32),
    _Family(True, "ip6tables-nft", "KUBE-6-", PODS6, 128),
)


class IpvsNodes(KubeProxyNode):
    """The nodes; no agent is started yet. ``ways`` also start from the far node, and from a pod
    whose sockets no hook sees.
    """

    names = NAMES | {"web-4"}

    def __init__(self, lab: Lab, folder: Path, engine: str) -> None:
        super().__init__(lab, folder, engine)
        self.far = lab.node("far", 2)
        lab.join(self.node, self.far)
        self.there = lab.pod(self.far, "web-4", 14)
        self.start_program(self.there, "serve", self.there.name, str(TARGET))
        self.unhooked = lab.pod(self.node, "unhooked", 3, hooked=False)
        self.ways += [(self.unhooked, (vip, PORT)) for vip in (VIP, VIP6, NEAR, NEAR6)]
        for address in (self.node.v4, self.node.v6):
            self.ways += [(self.outside, (address, NEAR_NODEPORT)), (self.far, (address, NODEPORT))]
        self.publish(*self._services())

    @property
    def lasting(self) -> list[Way]:
        return [way for way in self.ways if self.flows_stay or way[0] in (self.client, self.node)]

    def _services(self) -> list[list[manifests.Manifest]]:
        named = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in PROTOCOLS]
        ports = [{**port, "port": PORT, "nodePort": NEAR_NODEPORT} for port in named]
        local: Any = {"type": "NodePort", "externalTrafficPolicy": "Local"}
        v4, v6 = (
            [
                *(endpoint(pod, v6=v6) for pod in self.web),
                endpoint(self.there, v6=v6, node=self.far.name),
            ]
            for v6 in (False, True)
        )
        near = [
            manifests.service("near", [NEAR, NEAR6], ports, **local),
            manifests.endpoint_slice("near", "IPv4", v4[:-1], named),
            manifests.endpoint_slice("near", "IPv6", v6[:-1], named),
        ]
        return [web(*v4, v6=v6, nodeport=NODEPORT), near]

    def feed(self, command: str, said: str = "") -> str:
        """Return the output of a command on the node."""
        words = [*self.node.enter, *command.split()]
        return subprocess.run(
            words, input=said, text=True, check=True, stdout=subprocess.PIPE
        ).stdout

    def add_ipvs(self) -> None:
        """Make what kube-proxy has made when it serves in mode ipvs with strictARP."""
        self.node.ip(f"link add {kubeproxy.IPVS_DEVICE} type dummy")
        for family in FAMILIES:
            self._add_family(family)
        for name, (value, _) in IPVS_SYSCTLS.items():
            if "localnet" not in name:
                self.node.sysctl(name.replace("/", "."), value)

    def of_kube_proxy(self, family: _Family) -> list[NodePort]:
        """Return the Services for kube-proxy's rules."""
        here = [(family.of(pod), self.node.name) for pod in self.web]
        there = (family.of(self.there), self.far.name)
        vips = (VIP6, NEAR6) if family.v6 else (VIP, NEAR)
        return [
            NodePort("web", vips[0], NODEPORT, PROTOCOLS, (*here, there)),
            NodePort("near", vips[1], NEAR_NODEPORT, PROTOCOLS, tuple(here)),
        ]

    def _add_family(self, family: _Family) -> None:
        them = self.of_kube_proxy(family)
        made = kubeproxy.ipvs(them, self.node.name, family.of(self.node), family.pods)
        self.feed("ipset -exist restore", made.sets)
        self.feed(f"{family.tool}-restore --noflush", made.rules)
        for protocol in PROTOCOLS:
            local = f"{family.sets}NODE-PORT-LOCAL-{protocol.upper()}"
            members = f"create {local} bitmap:port range 0-65535\nadd {local} {NEAR_NODEPORT}\n"
            self.feed("ipset restore", members)
            match = f"-p {protocol} -m set --match-set {local} dst -j RETURN"
            self.feed(f"{family.tool} -t nat -I KUBE-NODE-PORT {match}")
        nodad = " nodad" if family.v6 else ""
        for address in made.addresses:
            self.node.ip(
                f"address add {address}/{family.length} dev {kubeproxy.IPVS_DEVICE}{nodad}"
            )
        self.feed("ipvsadm --restore", made.servers)


@contextmanager
def running(folder: Path, engine: Engine) -> Iterator[IpvsNodes]:
    """Yield the nodes; everything is removed afterwards. Skips what this kernel lacks."""
    needs.ipvs()
    if engine is Engine.NETFILTER:
        needs.netfilter()
    with new_lab() as lab:
        made = IpvsNodes(lab, folder, engine)
        try:
            yield made
        finally:
            made.close()
