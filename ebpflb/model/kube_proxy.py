# SPDX-License-Identifier: Apache-2.0
"""The names of what kube-proxy makes on a node, and whether one runs there (kube-proxy.md 17).

The names are those of its iptables, ipvs and nftables modes, of 1.36 and what older ones had
besides. KUBE-FIREWALL, KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT and KUBE-MARK-DROP are kubelet's.
"""

import re
from typing import NamedTuple

NFT_TABLE = "kube-proxy"  # of the families ip and ip6
DEVICE = "kube-ipvs0"
PROXY_MODE_PORT = 10249  # where /proxyMode is
PROXY_MODES = ("iptables", "ipvs", "nftables", "userspace")
MARK_MASQ, POSTROUTING = "KUBE-MARK-MASQ", "KUBE-POSTROUTING"
RULES_RETURNED = "its rules have come back"  # why one is known to run that is not seen
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
    "KUBE-NODE-PORT",  # from here on: of the ipvs mode
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
    """Whether a chain of iptables is kube-proxy's, and of no other program."""
    return name in TOP_LEVEL_CHAINS or name in _OTHER_CHAINS or bool(_OF_A_SERVICE.fullmatch(name))


class Detection(NamedTuple):
    """What was found of kube-proxy in one network namespace at one time."""

    pids: tuple[int, ...] = ()  # processes of that name
    proxy_modes: tuple[tuple[str, str], ...] = ()  # what answers /proxyMode: address, mode
    rules: tuple[str, ...] = ()  # where rules of it are
    rules_returned: bool = False  # they were not there the time before
    left: str = ""  # which Services ebpflb leaves to it, in words
    unattended: str = ""  # since when ebpflb's programs serve without an agent, in words
    unseen: bool = False  # a container sees no processes of the node

    @property
    def running(self) -> bool:
        """Whether one runs, even if its process cannot be seen (a pod does not see others')."""
        return bool(self.pids or self.proxy_modes or self.rules_returned)

    def compared_with(self, previous: "Detection | None") -> "Detection":
        """The same detection; after ``previous`` it is known whether rules have returned."""
        were_gone = previous is not None and (previous.rules_returned or not previous.rules)
        return self._replace(rules_returned=bool(self.rules) and were_gone)

    @property
    def is_overruled(self) -> bool:
        """Whether one runs in vain: old programs of ebpflb choose the endpoints before it."""
        return self.running and bool(self.unattended)

    @property
    def evidence(self) -> str:
        """Why one is known to run."""
        words = [f"pid {pid}" for pid in self.pids]
        words += [f"mode {mode} at {where}" for where, mode in self.proxy_modes]
        return ", ".join(words or [RULES_RETURNED])

    @property
    def state(self) -> str:
        """Whether it runs or has left rules; "none" otherwise."""
        if self.running:
            return f"is also running ({self.evidence})"
        if self.rules and self.unseen:
            unknown = "whether it runs is unknown, as a container does not see its process"
            return f"has left {', '.join(self.rules)}; {unknown}"
        if self.rules:
            return f"has stopped and left {', '.join(self.rules)}"
        return "does not run" if self.left else "none"

    @property
    def advice(self) -> str:
        """What that means for ebpflb, and what to do; "" for none."""
        if self.left:
            return self._advice_for_both
        if self.is_overruled:
            return (
                f"ebpflb's programs handle packets first, and no agent updates them"
                f" ({self.unattended}): start the agent, or run `ebpflb cleanup` so that kube-proxy"
                " serves"
            )
        if self.running:
            return f"ebpflb handles packets first; stop kube-proxy, then {CLEANUP}"
        if not self.rules:
            return ""
        stale = "packets that ebpflb leaves alone, for example to deleted services, still follow"
        stopped = "once it has stopped " if self.unseen else ""
        return f"{stale} these rules; {stopped}{CLEANUP} removes them"

    @property
    def _advice_for_both(self) -> str:
        """Where Services are left to it."""
        if self.running:
            return ""
        stale = "follow these rules as they were" if self.rules else "are not served"
        return f"{self.left} {stale}; start kube-proxy"

    @property
    def message(self) -> str | None:
        """State and advice, for the operator; None for none."""
        return f"{self.state}: {self.advice}" if self.advice else None

    @property
    def log_message(self) -> str | None:
        """The same as a line of the log."""
        return f"kube-proxy {self.message}" if self.message else None
