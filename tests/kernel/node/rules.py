# SPDX-License-Identifier: Apache-2.0
"""Rules of a node for iptables-restore: kube-proxy's for each mode, and those of other programs.

They are shortened output of iptables-save. {net} and {pod} begin an address of the family, {all} is
the length of an address.
"""

from pathlib import Path


def _recorded(name: str) -> str:
    return Path(__file__).with_name("recorded").joinpath(name).read_text()


FAMILIES = {
    "iptables": {"net": "10.96.0.", "pod": "10.244.1.", "all": "32", "some": "24", "icmp": "icmp"},
    "ip6tables": {
        "net": "fd00:96::",
        "pod": "fd00:244:1::",
        "all": "128",
        "some": "120",
        "icmp": "ipv6-icmp",
    },
}

# kubelet: 1.31, and the nat part that it had until 1.28.
KUBELET = _recorded("kubelet.rules")

# The CNI plugin portmap, for a pod with a hostPort.
PORTMAP = _recorded("portmap.rules")

# The same with externalSetMarkChain: KUBE-MARK-MASQ.
MARKING_PORTMAP = _recorded("marking-portmap.rules")

CALICO = _recorded("calico.rules")

UFW = _recorded("ufw.rules")

# Of an operator who calls chains as kube-proxy does, but not quite.
OPERATOR = _recorded("operator.rules")

NEIGHBOURS = (KUBELET, PORTMAP, CALICO, UFW, OPERATOR)

# 1.36, one service with a NodePort and source ranges, one without endpoints.
IPTABLES_MODE = _recorded("iptables-mode.rules")

# Its sets have other names for IPv6; {set} is what theirs begin with.
IPVS_MODE = _recorded("ipvs-mode.rules")

IPVS_SETS = {
    "LOOP-BACK": "hash:ip,port,ip",
    "CLUSTER-IP": "hash:ip,port",
    "LOAD-BALANCER": "hash:ip,port",
    "NODE-PORT-TCP": "bitmap:port",
    "HEALTH-CHECK-NODE-PORT": "bitmap:port",
}

NFTABLES_MODE = _recorded("nftables-mode.nft")
