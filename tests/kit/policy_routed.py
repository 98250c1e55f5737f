# SPDX-License-Identifier: Apache-2.0
"""Nodes with two uplinks, whose pods' packets are routed to the second one."""

from pathlib import Path

from ebpflb.lab import cni, manifests
from ebpflb.lab.hosts import Host, Lab
from tests.kit.cluster import endpoint, web
from tests.kit.lab_cluster import NODEPORT, TARGET, LabCluster
from tests.kit.pod_networks import Overlay, Routed

MARKS = """
table inet aws {
    chain prerouting {
        type filter hook prerouting priority mangle;
        iifname "eth0" fib daddr type local ct mark set 0x80
        iifname "veth*" meta mark set ct mark
    }
}
"""
ONLY_PODS = """
table inet source_check {
    chain forward {
        type filter hook forward priority 0;
        iifname "second" ip saddr != 10.244.0.0/16 drop
        iifname "second" ip6 saddr != fd00:244::/32 drop
    }
}
"""


class PolicyRouted(LabCluster):
    """A node with a pod that serves. With ``second_uplink`` it has two, and packets from its pod
    are routed to the second one, "eth1".
    """

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        *options: str,
        network: cni.Cni | None = None,
        second_uplink: bool = True,
    ) -> None:
        super().__init__(lab, folder)
        self.node = lab.node("node", 1, network or Routed())
        self.pod = lab.pod(self.node, "web-1", 11)
        self.outside = lab.outside("outside", 1)
        self.agent = self.add_agent(self.node, *options)
        self.start_program(self.pod, "serve", self.pod.name, str(TARGET))
        self.second_uplink = second_uplink
        if second_uplink:
            self._second_uplink()
            self.node.nft(MARKS)
            lab.router.nft(ONLY_PODS)

    def _second_uplink(self) -> None:
        router, node = self.lab.router, self.node
        router.ip(f"link add second type veth peer name eth1 netns {node.netns}")
        node.ip("link set eth1 up")
        router.ip("link set second up")
        for v6, ours, theirs in (
            (False, "172.31.0.2/30", "172.31.0.1/30"),
            (True, "fd31::2/64", "fd31::1/64"),
        ):
            nodad = " nodad" if v6 else ""
            router.ip(f"address add {theirs} dev second{nodad}")
            node.ip(f"address add {ours} dev eth1{nodad}")
            gateway = theirs.partition("/")[0]
            node.ip(
                f"route add default via {gateway} dev eth1 table 2",
                "rule add fwmark 0x80/0x80 lookup main priority 1024",
                v6=v6,
            )
        self.lead_astray(self.pod)

    def lead_astray(self, pod: Host) -> None:
        """Routes what comes from this pod to the second uplink."""
        for v6, where in ((False, pod.v4), (True, pod.v6)):
            self.node.ip(f"rule add from {where} lookup 2 priority 1536", v6=v6)

    def serve(self, policy: str) -> None:
        self.publish(
            web(
                endpoint(self.pod),
                v6=[endpoint(self.pod, v6=True)],
                nodeport=NODEPORT,
                externalTrafficPolicy=policy,
                ipFamilyPolicy="RequireDualStack",
            )
        )


SERVED, OURS, CLOSED = 0, 1, 2  # ports of a service of TwoPlaces, after 30100 or 30200
OWN_TARGET = 9090  # a socket of the test's own


class TwoPlaces(PolicyRouted):
    """With a second pod, on another node, beyond a tunnel: "web-1" and "there" have a Service each,
    at the NodePorts from 30100 and 30200 on.
    """

    def __init__(self, lab: Lab, folder: Path, *options: str, second_uplink: bool) -> None:
        super().__init__(lab, folder, *options, network=Overlay(), second_uplink=second_uplink)
        far = lab.node("far", 2, Overlay())
        lab.join(self.node, far)
        self.there = lab.pod(far, "there", 11)
        self.start_program(self.there, "serve", self.there.name, str(TARGET))
        if second_uplink:
            self.lead_astray(self.there)
        self.outside.ip("link set eth0 mtu 1450")  # as beyond the tunnel

    def pod_of(self, name: str) -> Host:
        return self.there if name == "there" else self.pod

    def serve_both(self) -> None:
        self.publish(
            self._service(self.pod, 30100, "node"), self._service(self.there, 30200, "far")
        )

    def _service(self, pod: Host, nodeport: int, node: str) -> list[manifests.Manifest]:
        named = [
            {"name": "tcp", "port": TARGET, "protocol": "TCP"},
            {"name": "udp", "port": TARGET, "protocol": "UDP"},
            {"name": "ours", "port": OWN_TARGET, "protocol": "UDP"},
            {"name": "closed", "port": OWN_TARGET + 1, "protocol": "UDP"},
        ]
        offsets = (SERVED, SERVED, OURS, CLOSED)
        ports = [
            {**port, "nodePort": nodeport + offset}
            for port, offset in zip(named, offsets, strict=True)
        ]
        number = nodeport // 100 - 290
        ips = [f"10.96.0.{number}", f"fd00:96::{number}"]
        made = [manifests.service(pod.name, ips, ports, type="NodePort")]
        for family, where in (("IPv4", pod.v4), ("IPv6", pod.v6)):
            ends = [manifests.endpoint(where, node=node, target=pod.name)]
            made.append(manifests.endpoint_slice(pod.name, family, ends, named))
        return made

    def to(self, name: str, port: int, *, v6: bool) -> tuple[str, int]:
        """Return the address and port where a client reaches this port of the pod's service."""
        nodeport = 30200 if name == "there" else 30100
        return (self.node.v6 if v6 else self.node.v4), nodeport + port
