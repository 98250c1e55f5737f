# SPDX-License-Identifier: Apache-2.0
"""A node with two uplinks, whose pods' packets are routed to the second one."""

from pathlib import Path

from ebpflb.lab import cni
from ebpflb.lab.hosts import Host, Lab
from tests.kit.cluster import endpoint, web
from tests.kit.lab_cluster import NODEPORT, TARGET, LabCluster

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
    """A node with two uplinks; packets from its pod are routed to the second one, "eth1"."""

    def __init__(
        self, lab: Lab, folder: Path, *options: str, network: cni.Cni | None = None
    ) -> None:
        super().__init__(lab, folder)
        self.node = lab.node("node", 1, network or cni.Routed())
        self.pod = lab.pod(self.node, "web-1", 11)
        self.outside = lab.outside("outside", 1)
        self.agent = self.add_agent(self.node, *options)
        self.start_program(self.pod, "serve", self.pod.name, str(TARGET))
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
