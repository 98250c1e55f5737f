# SPDX-License-Identifier: Apache-2.0
"""The names that kube-proxy uses on a node, and how its rules are read (kube-proxy.md 17).

The names are those of its iptables, ipvs and nftables modes in 1.36, plus those of older releases.
KUBE-FIREWALL, KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT and KUBE-MARK-DROP belong to the kubelet.
"""

import re
from collections.abc import Iterator, Mapping, Set
from functools import cached_property
from ipaddress import IPv4Address, ip_address
from typing import NamedTuple

from ebpflb.model.addresses import Address, host_port
from ebpflb.model.services import PROTOCOLS

# The virtual servers of IPVS, and which of them belong to kube-proxy (kube-proxy.md 17).

_HEX = 16
End = tuple[Address, int]  # address and port


class VirtualServer(NamedTuple):
    """An address on which IPVS listens; ``protocol`` is TCP, UDP or SCTP.

    ``connections``: those that it knows, also half-closed ones and flows of datagrams.
    """

    protocol: str
    address: Address
    port: int
    connections: int = 0

    def __str__(self) -> str:
        return f"{host_port(self.address, self.port)}/{self.protocol}"


def parse_virtual_servers(table: str) -> list[VirtualServer]:
    """Parse the text of /proc/net/ip_vs, without servers for a firewall mark (FWM).

    A server's line is followed by those of its destinations, with the active and the inactive
    connections of each in the last two columns.
    """
    found: list[VirtualServer] = []
    listed = False
    for words in filter(None, map(str.split, table.splitlines())):
        if words[0] in PROTOCOLS:
            found.append(_server(*words[:2]))
        if words[0] == "->" and listed:
            more = int(words[-2]) + int(words[-1])
            found[-1] = found[-1]._replace(connections=found[-1].connections + more)
        listed = words[0] in PROTOCOLS or (listed and words[0] == "->")
    return found


def _server(protocol: str, where: str) -> VirtualServer:
    host, _, port = where.rpartition(":")
    return VirtualServer(protocol, *_end(host.strip("[]"), port))


def _end(host: str, port: str) -> End:
    return ip_address(host) if ":" in host else IPv4Address(int(host, _HEX)), int(port, _HEX)


def parse_datagrams(table: str) -> dict[tuple[End, End], End]:
    """Parse UDP's flows in the text of /proc/net/ip_vs_conn: client, virtual server -> server."""
    lines = (line.split() for line in table.splitlines() if line.startswith("UDP"))
    ends = ([_end(*its[at : at + 2]) for at in (1, 3, 5)] for its in lines)
    return {(client, virtual): server for client, virtual, server in ends}


def split(
    servers: list[VirtualServer], device: Set[Address], node_ports: Mapping[str, Set[int]]
) -> tuple[list[VirtualServer], list[VirtualServer]]:
    """Return the servers of kube-proxy, and the others.

    kube-proxy's servers have an address of its ``device``, or a port in its ipsets of NodePorts
    (``node_ports``: protocol -> ports). kube-proxy's own cleanup removes all servers; ours does
    not.
    """
    ours = [
        server
        for server in servers
        if server.address in device or server.port in node_ports.get(server.protocol, ())
    ]
    return ours, [server for server in servers if server not in ours]


# The sysctls that mode ipvs sets, some of them only in older releases or with strictARP: its value
# and the kernel's default. Below conf another program may have set the same.
IPVS_SYSCTLS = {
    "net/ipv4/vs/conntrack": ("1", "0"),
    "net/ipv4/vs/expire_nodest_conn": ("1", "0"),
    "net/ipv4/vs/expire_quiescent_template": ("1", "0"),
    "net/ipv4/vs/conn_reuse_mode": ("0", "1"),
    "net/ipv4/conf/all/arp_ignore": ("1", "0"),
    "net/ipv4/conf/all/arp_announce": ("2", "0"),
    "net/ipv4/conf/all/route_localnet": ("1", "0"),
}

NFT_TABLE = "kube-proxy"  # of the families ip and ip6
DEVICE = "kube-ipvs0"
PROXY_MODE_PORT = 10249  # where /proxyMode is
PROXY_MODES = ("iptables", "ipvs", "nftables", "userspace")
MARK_MASQ, POSTROUTING = "KUBE-MARK-MASQ", "KUBE-POSTROUTING"
RULES_RETURNED = "its rules have come back"  # the evidence for a kube-proxy that is not visible
CLEANUP = "`ebpflb cleanup --kube-proxy`"
IPTABLES = ("nat", "filter", "mangle")  # the tables with chains of kube-proxy

# Chains that the kernel's own chains jump to; _OTHER_CHAINS are reached only from these.
TOP_LEVEL_CHAINS = {
    POSTROUTING,
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-NODEPORTS",
    "KUBE-FORWARD",
    "KUBE-PROXY-FIREWALL",
    "KUBE-NODE-PORT",  # from here on: ipvs mode
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
}
_OTHER_CHAINS = {
    MARK_MASQ,
    "KUBE-PROXY-CANARY",
    "KUBE-LOAD-BALANCER",
    "KUBE-SOURCE-RANGES-FIREWALL",
}
# KUBE-XLB- was used until 1.23. The suffix is a hash in base 32.
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
# The ports that kube-proxy serves on the node's own addresses: protocol -> sets of ports. These
# sets include the ports of its LOCAL sets.
NODE_PORTS = {
    protocol: tuple(f"{start}NODE-PORT-{kind}" for start in ("KUBE-", "KUBE-6-"))
    for protocol, kind in (("TCP", "TCP"), ("UDP", "UDP"), ("SCTP", "SCTP-HASH"))
}


def is_chain(name: str) -> bool:
    """Whether a chain of iptables belongs to kube-proxy and to no other program."""
    return name in TOP_LEVEL_CHAINS or name in _OTHER_CHAINS or bool(_OF_A_SERVICE.fullmatch(name))


class Detection(NamedTuple):
    """The traces of kube-proxy in one network namespace at one time."""

    pids: tuple[int, ...] = ()  # processes named kube-proxy
    proxy_modes: tuple[tuple[str, str], ...] = ()  # answers of /proxyMode: address, mode
    rules: tuple[str, ...] = ()  # where kube-proxy's rules are
    rules_returned: bool = False  # they were absent the time before
    left_to_it: str = ""  # the Services that ebpflb leaves to kube-proxy, in words
    unattended: str = ""  # since when no agent runs for ebpflb's programs, in words
    unseen: bool = False  # a container sees no processes of the node

    @property
    def running(self) -> bool:
        """Whether kube-proxy runs.

        Its process may be invisible, as other pods' processes are to a pod.
        """
        return bool(self.pids or self.proxy_modes or self.rules_returned)

    def compared_with(self, previous: "Detection | None") -> "Detection":
        """Return the same detection, with ``rules_returned`` set by comparing with ``previous``."""
        were_gone = previous is not None and (previous.rules_returned or not previous.rules)
        return self._replace(rules_returned=bool(self.rules) and were_gone)

    @property
    def is_overruled(self) -> bool:
        """Whether kube-proxy runs without effect.

        Old programs of ebpflb choose the endpoints before kube-proxy does.
        """
        return self.running and bool(self.unattended)

    @property
    def evidence(self) -> str:
        """The evidence that kube-proxy runs."""
        words = [f"pid {pid}" for pid in self.pids]
        words += [f"mode {mode} at {where}" for where, mode in self.proxy_modes]
        return ", ".join(words or [RULES_RETURNED])

    @property
    def state(self) -> str:
        """Whether kube-proxy runs or has left rules; "none" otherwise."""
        if self.running:
            return f"is also running ({self.evidence})"
        if self.rules and self.unseen:
            unknown = "whether it runs is unknown, as a container does not see its process"
            return f"has left {', '.join(self.rules)}; {unknown}"
        if self.rules:
            return f"has stopped and left {', '.join(self.rules)}"
        return "does not run" if self.left_to_it else "none"

    @property
    def advice(self) -> str:
        """The consequence for ebpflb, and what to do; "" if there is none."""
        if self.left_to_it:
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
        """The advice if Services are left to kube-proxy."""
        if self.running:
            return ""
        stale = "follow these rules as they were" if self.rules else "are not served"
        return f"{self.left_to_it} {stale}; start kube-proxy"

    @property
    def message(self) -> str | None:
        """State and advice for the operator; None if there is no advice."""
        return f"{self.state}: {self.advice}" if self.advice else None

    @property
    def log_message(self) -> str | None:
        """The message as a line of the log."""
        return f"kube-proxy {self.message}" if self.message else None


# Parse the output of iptables-save, and write the removal of kube-proxy's part of it.
#
# Other programs' rules stay. A chain of kube-proxy that one of them jumps to stays too, but is
# flushed. KUBE-MARK-MASQ is an exception: if other rules jump to it, KUBE-MARK-MASQ and the chain
# that masquerades marked packets keep their rules (CNIs' host ports may need them: portmap's
# externalSetMarkChain).

_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
# The matches that kube-proxy's rules in the kernel's own chains may have before the jump.
_IN_A_JUMP = re.compile(
    r'(?:-m conntrack --ctstate NEW |-m comment --comment (?:"(?:[^"\\]|\\.)*"|\S+) )*-j \S+'
)


class Option(NamedTuple):
    """One option of iptables-save, such as "--dport", "80"."""

    name: str
    value: str = ""
    negated: bool = False


def read_options(text: str) -> list[Option]:
    """Return each option with the words that follow it; negated if a "!" precedes it."""
    found: list[Option] = []
    negated = False
    for word in _WORD.findall(text):
        if word == "!":
            negated = True
        elif word.startswith("-") and not word[1:2].isdigit():
            found.append(Option(word, "", negated))
            negated = False
        elif found:
            found[-1] = found[-1]._replace(value=f"{found[-1].value} {word}".strip())
    return found


class IptablesRule(NamedTuple):
    """A rule: its chain, and the rest as iptables-save writes it."""

    chain: str
    text: str

    @property
    def target(self) -> str:
        """The chain or target that the rule jumps to; "" for none."""
        return self._value("-j") or self._value("-g")

    @property
    def set(self) -> str:
        """The first ipset that the rule matches; "" for none."""
        return self._value("--match-set").partition(" ")[0]

    @property
    def is_bare(self) -> bool:
        """Whether the rule matches nothing except new connections."""
        return bool(_IN_A_JUMP.fullmatch(self.text))

    def _value(self, option: str) -> str:
        return next((each.value for each in read_options(self.text) if each.name == option), "")


class IptablesTable(NamedTuple):
    """One table: chain -> whether it is the kernel's own, and all rules in order.

    ``policies`` are those of the kernel's own chains: ACCEPT or DROP.
    """

    name: str
    chains: dict[str, bool]
    rules: list[IptablesRule]
    policies: dict[str, str]


def parse_rules(saved: str) -> list[IptablesTable]:
    """Parse the tables of iptables-save, with or without counters."""
    tables: list[IptablesTable] = []
    for line in saved.splitlines():
        match line[:1]:
            case "*":
                tables.append(IptablesTable(line[1:].strip(), {}, [], {}))
            case ":":
                name, policy = line[1:].split()[:2]
                tables[-1].chains[name] = policy != "-"
                tables[-1].policies[name] = policy
            case "-" | "[":
                _, chain, text = line[line.index("-A ") :].split(" ", 2)
                tables[-1].rules.append(IptablesRule(chain, text))
    return tables


class Removal:
    """The removal from one table; false if nothing has to be removed.

    ``deleted_chains`` are deleted, ``flushed_chains`` stay without rules, ``masquerade_chains``
    stay with their rules, because other programs' rules need them.
    """

    def __init__(self, table: IptablesTable) -> None:
        self.table = table
        known = [name for name in table.chains if is_chain(name)]
        self.own_chains = set(known) if table.name in IPTABLES else set()
        used = self.references.keys()
        self.masquerade_chains = (
            {MARK_MASQ, POSTROUTING} & self.own_chains if MARK_MASQ in used else set()
        )
        deleted = self.own_chains - used - self.masquerade_chains
        self.deleted_chains = [name for name in known if name in deleted]
        self.flushed_chains = [
            name for name in used if name not in self.masquerade_chains and self._has_rules(name)
        ]

    @cached_property
    def references(self) -> dict[str, list[str]]:
        """kube-proxy's chains that other programs' rules jump to -> the chains of these rules."""
        found: dict[str, list[str]] = {}
        for rule in self.table.rules:
            if (
                rule.chain not in self.own_chains
                and rule.target in self.own_chains
                and not self._jump(rule)
            ):
                chains = found.setdefault(rule.target, [])
                if rule.chain not in chains:
                    chains.append(rule.chain)
        return found

    @cached_property
    def deleted_rules(self) -> list[IptablesRule]:
        """Single rules: jumps to deleted chains, and matches of ipsets that will be removed."""
        return [
            rule
            for rule in self.table.rules
            if (self._jump(rule) and rule.target not in self.masquerade_chains)
            or (
                rule.chain in self.masquerade_chains
                and (rule.set in SETS or rule.target in self.deleted_chains)
            )
        ]

    def __bool__(self) -> bool:
        return bool(self.deleted_chains or self.flushed_chains or self.deleted_rules)

    @property
    def summary(self) -> str:
        """The number of chains and rules, in words."""
        counts = {
            "chain": len(self.deleted_chains) + len(self.flushed_chains),
            "rule": len(self.deleted_rules),
        }
        return " and ".join(f"{n} {word}{'s' * (n > 1)}" for word, n in counts.items() if n)

    @property
    def retained(self) -> str:
        """The chains that stay, and which rules use them; "" for none."""
        users = dict.fromkeys(chain for chains in self.references.values() for chain in chains)
        names = dict.fromkeys([*self.references, *sorted(self.masquerade_chains)])
        return f"{', '.join(names)}: used by rules in {', '.join(users)}" if names else ""

    @property
    def script(self) -> str:
        """The input for iptables-restore --noflush, which applies all of it or nothing."""
        return "\n".join([f"*{self.table.name}", *self._lines(), "COMMIT", ""])

    def _lines(self) -> Iterator[str]:
        """Yield the lines; naming a chain flushes it."""
        yield from (f":{name} - [0:0]" for name in (*self.deleted_chains, *self.flushed_chains))
        yield from (f"-D {rule.chain} {rule.text}" for rule in self.deleted_rules)
        yield from (f"-X {name}" for name in self.deleted_chains)

    def _jump(self, rule: IptablesRule) -> bool:
        """Whether the rule is kube-proxy's jump from one of the kernel's own chains."""
        own = self.table.chains.get(rule.chain, False)
        return own and rule.target in self.own_chains & TOP_LEVEL_CHAINS and rule.is_bare

    def _has_rules(self, name: str) -> bool:
        return any(rule.chain == name for rule in self.table.rules)
