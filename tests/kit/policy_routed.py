# SPDX-License-Identifier: Apache-2.0
"""A node whose pods' replies are routed to a second uplink, where they are lost."""

from pathlib import Path

from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.manifests import Manifest
from tests.kit.lab_cluster import TARGET, LabCluster
from tests.kit.pod_networks import Overlay

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


SERVICES = {"web-1": 30100, "there": 30200}  # pods and their NodePorts


class TwoPlaces(LabCluster):
    """A pod on this node, "web-1", and a pod beyond a tunnel on another node, "there", each with a
    Service. With ``second_uplink`` the node also has "eth1", to which packets from both pods are
    routed.
    """

    def __init__(self, lab: Lab, folder: Path, *options: str, second_uplink: bool) -> None:
        super().__init__(lab, folder)
        self.node, far = (lab.node(name, n, Overlay()) for n, name in ((1, "node"), (2, "far")))
        self.pods = [lab.pod(self.node, "web-1", 11), lab.pod(far, "there", 11)]
        self.outside = lab.outside("outside", 1)
        self.agent = self.add_agent(self.node, *options)
        for pod in self.pods:
            self.start_program(pod, "serve", pod.name, str(TARGET))
        lab.join(self.node, far)
        self.second_uplink = second_uplink
        if second_uplink:
            self._second_uplink()
            self.node.nft(MARKS)
            lab.router.nft(ONLY_PODS)
        self.outside.ip("link set eth0 mtu 1450")  # as beyond the tunnel

    def serve(self) -> None:
        self.publish(*map(self._service, self.pods))

    def _second_uplink(self) -> None:
        router, node = self.lab.router, self.node
        router.ip(f"link add second type veth peer name eth1 netns {node.netns}")
        node.ip("link set eth1 up")
        router.ip("link set second up")
        for v6, ours, theirs in (
            (False, "172.31.0.2/30", "172.31.0.1/30"),
            (True, "fd31::2/64", "fd31::1/64"),
        ):
            router.ip(f"address add {theirs} dev second{' nodad' if v6 else ''}")
            node.ip(f"address add {ours} dev eth1{' nodad' if v6 else ''}")
            gateway = theirs.partition("/")[0]
            sources = (pod.v6 if v6 else pod.v4 for pod in self.pods)
            node.ip(
                f"route add default via {gateway} dev eth1 table 2",
                "rule add fwmark 0x80/0x80 lookup main priority 1024",
                *(f"rule add from {source} lookup 2 priority 1536" for source in sources),
                v6=v6,
            )

    def _service(self, pod: Host) -> list[Manifest]:
        named = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in ("tcp", "udp")]
        ports = [{**port, "nodePort": SERVICES[pod.name]} for port in named]
        node, number = "far" if pod.name == "there" else "node", SERVICES[pod.name] // 100
        ips = [f"10.96.1.{number - 300}", f"fd00:96::{number}"]
        made = [manifests.service(pod.name, ips, ports, type="NodePort")]
        for family, where in (("IPv4", pod.v4), ("IPv6", pod.v6)):
            ends = [manifests.endpoint(where, node=node, target=pod.name)]
            made.append(manifests.endpoint_slice(pod.name, family, ends, named))
        return made

    def to(self, name: str, *, v6: bool) -> tuple[str, int]:
        """Return the address and port where a client outside reaches this pod's Service."""
        return (self.node.v6 if v6 else self.node.v4), SERVICES[name]
