# SPDX-License-Identifier: Apache-2.0
"""What kube-proxy leaves on a node, by name, and how it stands with it (kube-proxy.md 17).

The names are those of its iptables, ipvs and nftables modes, of 1.36 and what older ones had
besides. KUBE-FIREWALL, KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT and KUBE-MARK-DROP are kubelet's.
"""

import re
from typing import NamedTuple

NFT_TABLE = "kube-proxy"  # of the families ip and ip6
DEVICE = "kube-ipvs0"
METRICS_PORT = 10249  # where /proxyMode is
MODES = ("iptables", "ipvs", "nftables", "userspace")
MARK_MASQ, POSTROUTING = "KUBE-MARK-MASQ", "KUBE-POSTROUTING"
CLEANUP = "`ebpflb cleanup --kube-proxy`"
IPTABLES = ("nat", "filter", "mangle")  # the tables that it has chains in

# Chains that the kernel's own chains jump to, and those that only these jump to.
TOP_LEVEL_CHAINS = {
    POSTROUTING,
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-NODEPORTS",
    "KUBE-FORWARD",
    "KUBE-PROXY-FIREWALL",
    "KUBE-NODE-PORT",  # from here on of the ipvs mode
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
}
_OTHER_CHAINS = {
    MARK_MASQ,
    "KUBE-PROXY-CANARY",
    "KUBE-LOAD-BALANCER",
    "KUBE-SOURCE-RANGES-FIREWALL",
}
# KUBE-XLB-: until 1.23. What follows is a hash in base 32.
_OF_A_SERVICE = re.compile(r"KUBE-(?:SVC|SVL|EXT|FW|SEP|XLB)-[A-Z2-7]{16}")

_KINDS = (
    "LOOP-BACK",
    "CLUSTER-IP",
    "EXTERNAL-IP",
    "EXTERNAL-IP-LOCAL",
    "LOAD-BALANCER",
    "LOAD-BALANCER-LOCAL",
    "LOAD-BALANCER-FW",
    "LOAD-BALANCER-SOURCE-IP",
    "LOAD-BALANCER-SOURCE-CIDR",
    *(f"NODE-PORT-{end}" for end in ("TCP", "UDP", "SCTP", "SCTP-HASH")),
    *(f"NODE-PORT-LOCAL-{end}" for end in ("TCP", "UDP", "SCTP", "SCTP-HASH")),
    "HEALTH-CHECK-NODE-PORT",
    "IPVS-IPS",
)
_LONGEST = 31  # of an ipset's name
SETS = frozenset(f"{start}{kind}"[:_LONGEST] for start in ("KUBE-", "KUBE-6-") for kind in _KINDS)
# Which ports kube-proxy serves on the node's own addresses: protocol -> sets of ports, which hold
# those of its LOCAL sets too.
NODE_PORTS = {
    protocol: tuple(f"{start}NODE-PORT-{kind}" for start in ("KUBE-", "KUBE-6-"))
    for protocol, kind in (("TCP", "TCP"), ("UDP", "UDP"), ("SCTP", "SCTP-HASH"))
}


def is_chain(name: str) -> bool:
    """Whether a chain of iptables is kube-proxy's and nobody else's."""
    return name in TOP_LEVEL_CHAINS or name in _OTHER_CHAINS or bool(_OF_A_SERVICE.fullmatch(name))


class Detection(NamedTuple):
    """What can be seen of kube-proxy in one network namespace at one time."""

    pids: tuple[int, ...] = ()  # processes of that name
    proxy_modes: tuple[tuple[str, str], ...] = ()  # who says to be one: where, and its mode
    rules: tuple[str, ...] = ()  # what is there of its rules
    rules_returned: bool = False  # they were not there before

    @property
    def running(self) -> bool:
        """Whether one is at work, seen or not (in a pod we see no other pod's processes)."""
        return bool(self.pids or self.proxy_modes or self.rules_returned)

    def compared_with(self, previous: "Detection | None") -> "Detection":
        """The same, known that ``previous`` was found earlier."""
        missed = previous is not None and (previous.rules_returned or not previous.rules)
        return self._replace(rules_returned=bool(self.rules) and missed)

    @property
    def evidence(self) -> str:
        """By what one is known to be at work."""
        words = [f"pid {pid}" for pid in self.pids]
        words += [f"mode {mode} at {where}" for where, mode in self.proxy_modes]
        return ", ".join(words or ["its rules have come back"])

    @property
    def state(self) -> str:
        """What there is; "none" where nothing is."""
        if self.running:
            return f"is also running ({self.evidence})"
        return f"has stopped and left {', '.join(self.rules)}" if self.rules else "none"

    @property
    def advice(self) -> str:
        """What it does beside ebpflb, and what to do; "" where nothing is."""
        if self.running:
            return f"ebpflb handles packets first; stop kube-proxy, then {CLEANUP}"
        if not self.rules:
            return ""
        stale = "packets that ebpflb leaves alone, for example to deleted services, still follow"
        return f"{stale} these rules; {CLEANUP} removes them"

    @property
    def message(self) -> str | None:
        """Both, for the operator; None where there is nothing to say."""
        return f"{self.state}: {self.advice}" if self.advice else None

    @property
    def log_message(self) -> str | None:
        """The same as a sentence of the log."""
        return f"kube-proxy {self.message}" if self.message else None
