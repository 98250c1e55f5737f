# SPDX-License-Identifier: Apache-2.0
"""The lab of the NodePort measurement: a client outside, and one node for each implementation.

    client ── router ─┬─ plain      no service: the client connects to the pods
                      ├─ ebpflb     ebpflb's flow tables; no packet filter, so no conntrack either
                      ├─ tracked    the same beside a CNI that masquerades its pods: conntrack
                      ├─ netfilter  ebpflb's engine netfilter
                      ├─ flowtable  the same with --fast-forward, where the kernel has nf_flow_table
                      ├─ nftables   kube-proxy's rules (see ``kubeproxy``)
                      ├─ iptables   the same by iptables-legacy
                      ├─ ipvs       the same in mode ipvs, where the kernel has it
                      └─ far        the remote backend, for all of them

Each of the others has a pod of its own, the local backend; sockets of pods are hooked where ebpflb
is, as on any node. Every node has the same two services, one for each backend, among
the same 1,000 others. Client and servers (load/) are in C, to cost little themselves, and run
on one CPU at real-time priority: nothing waits for another CPU to wake up, and a rate is what
everything costs, from connect() to the server and back.
"""

import subprocess
from contextlib import ExitStack
from ipaddress import IPv4Address
from pathlib import Path
from typing import NamedTuple

from bench import kubeproxy, services
from bench.services import NodePort
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab import cni
from ebpflb.lab.agents import LabAgent
from ebpflb.lab.hosts import Host, Lab

DIRECT, EBPFLB, TRACKED, NETFILTER, FLOWTABLE, NFTABLES, IPTABLES, IPVS = VARIANTS = (
    "direct",
    "ebpflb",
    "ebpflb beside conntrack",
    "ebpflb by netfilter",
    "ebpflb by netfilter --fast-forward",
    "nftables",
    "iptables",
    "ipvs",
)
LOCAL, REMOTE = PLACES = ("local", "remote")
NODES = {
    DIRECT: "plain",
    EBPFLB: "ebpflb",
    TRACKED: "tracked",
    NETFILTER: "netfilter",
    FLOWTABLE: "flowtable",
    NFTABLES: "nftables",
    IPTABLES: "iptables",
    IPVS: "ipvs",
}
PODS = cni.NETWORKS[0]
ENDPOINTS = 3  # of each other service
FAR = 10  # its number
BURST = 16  # datagrams, as in client.c
_FLOWS, _NETFILTER = ("--packet-path", "flows"), ("--packet-path", "netfilter")
_AGENTS = {
    EBPFLB: _FLOWS,
    TRACKED: _FLOWS,
    NETFILTER: _NETFILTER,
    FLOWTABLE: (*_NETFILTER, "--fast-forward=on"),
}
_POD = 11
_PORTS = dict(zip(PLACES, (30001, 30002), strict=True))
_MASQUERADE = f"""
table ip cni {{
  chain forward {{
    type filter hook forward priority 0
    ct state established,related accept
  }}
  chain postrouting {{
    type nat hook postrouting priority 100
    ip saddr {PODS} ip daddr != {PODS} masquerade
  }}
}}
"""
_FLOWTABLE = """
table inet probe {
  flowtable probe { hook ingress priority 0; devices = { eth0 }; }
}
"""

Where = tuple[str, int]
Case = tuple[str, str]  # variant, place


def build(folder: Path) -> None:
    """Build client, server and sender. Raises CalledProcessError if gcc fails."""
    for name in ("client", "server", "stream"):
        source = Path(__file__).parent / "load" / f"{name}.c"
        subprocess.run(["gcc", "-O2", "-o", str(folder / name), str(source)], check=True)


class Client:
    """A client on its host."""

    def __init__(self, lab: Lab, host: Host, folder: Path) -> None:
        self.host = host
        self.process = lab.keep(host.start([str(folder / "client")], **_PIPE))

    def do(self, command: str, where: Where, count: int) -> list[int]:
        """Run a command of client.c; return the nanoseconds that it answers."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{command} {where[0]} {where[1]} {count}\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise SystemExit(f"the client failed at: {command} {where[0]}:{where[1]}")
        return [int(word) for word in answer.split()]


class Site(NamedTuple):
    """A node and the backend on it."""

    node: Host
    pod: Host
    server: "subprocess.Popen[str]"

    @property
    def pod_network(self) -> str:
        return self.pod.v4.rpartition(".")[0] + ".0/24"


class NodePortLab:
    """Nodes, servers, clients and started agents; ``sites`` by variant."""

    def __init__(self, lab: Lab, folder: Path, stack: ExitStack, others: int) -> None:
        self.lab, self.folder = lab, folder
        build(folder)
        self.far = self._site("far", FAR)
        self.sites = {
            variant: self._site(name, number)
            for number, (variant, name) in enumerate(NODES.items(), start=1)
        }
        for site in self.sites.values():
            lab.join(site.node, self.far.node)
        self.client = Client(lab, lab.outside("client", 1), folder)
        self.other_client = Client(lab, lab.outside("other", 2), folder)
        self._add_routes()
        if not _takes(self.sites[FLOWTABLE], "nft --check --file -", _FLOWTABLE):
            del self.sites[FLOWTABLE]
        self.others = services.node_ports(others, ENDPOINTS)
        self.agents = {
            variant: self._start_agent(self.sites[variant], options, stack)
            for variant, options in _AGENTS.items()
            if variant in self.sites
        }
        self._add_rules()

    def target(self, variant: str, place: str) -> Where:
        """Return the client's destination."""
        site = self.sites[variant]
        if variant == DIRECT:
            return (site if place == LOCAL else self.far).pod.v4, services.TARGET
        return site.node.v4, _PORTS[place]

    def restart(self, variant: str, *options: str) -> LabAgent:
        """Restart the agent with other options."""
        agent = self.agents[variant]
        agent.stop()
        agent.options = (*_detecting(), *options)
        agent.start()
        return agent

    def _site(self, name: str, number: int) -> Site:
        """Make a node without ICMP redirects: the router would follow them and bypass the node."""
        node = self.lab.node(name, number)
        for device in ("all", "eth0"):
            node.sysctl(f"net.ipv4.conf.{device}.send_redirects", 0)
        pod = self.lab.pod(node, f"{name}-web", _POD)
        server = pod.start([str(self.folder / "server"), str(services.TARGET)], **_PIPE)
        self.lab.keep_ready(server)
        return Site(node, pod, server)

    def _add_routes(self) -> None:
        """Route pods through their nodes, far's through plain, in both directions."""
        self.lab.router.sysctl("net.bridge.bridge-nf-call-iptables", 0)
        plain = self.sites[DIRECT].node
        for site in self.sites.values():
            self.lab.router.lead(site.pod_network, site.node.v4)
        self.lab.router.lead(self.far.pod_network, plain.v4)
        self.far.node.ip(f"route add {self.client.host.v4} via {plain.v4}")

    def _services(self, site: Site) -> list[NodePort]:
        """Return the two measured Services among the others."""
        measured = [
            NodePort(
                name=f"web-{place}",
                address=str(IPv4Address(services.ADDRESS) + number),
                number=_PORTS[place],
                protocols=("tcp", "udp"),
                endpoints=((at.pod.v4, at.node.name),),
            )
            for number, (place, at) in enumerate(((LOCAL, site), (REMOTE, self.far)))
        ]
        half = len(self.others) // 2
        return [*self.others[:half], *measured, *self.others[half:]]

    def _start_agent(self, site: Site, options: tuple[str, ...], stack: ExitStack) -> LabAgent:
        agent = LabAgent(self.lab, site.node, self.folder, *_detecting())
        agent.defaults = options
        stack.callback(agent.close)
        them = self._services(site)
        services.write_node_ports(agent.manifests, site.node.name, site.node.v4, them)
        agent.start()
        return agent

    def _add_rules(self) -> None:
        """Load kube-proxy's and the CNI's rules. A kernel may lack iptables-legacy, or IPVS."""
        self.sites[TRACKED].node.nft(_MASQUERADE)
        site = self.sites[NFTABLES]
        them = self._services(site)
        site.node.nft(kubeproxy.nft(them, site.node.name, site.node.v4, PODS))
        site = self.sites[IPTABLES]
        if not _takes(
            site, "iptables-legacy-restore", kubeproxy.iptables(self._services(site), PODS)
        ):
            del self.sites[IPTABLES]
        if not self._add_ipvs(self.sites[IPVS]):
            del self.sites[IPVS]

    def _add_ipvs(self, site: Site) -> bool:
        """Return whether the kernel has IPVS."""
        wanted = kubeproxy.ipvs(self._services(site), site.node.name, site.node.v4, PODS)
        if not _takes(site, "ipvsadm --restore", wanted.servers):
            return False
        site.node.sysctl("net.ipv4.vs.conntrack", 1)
        site.node.sysctl("net.ipv4.vs.conn_reuse_mode", 0)
        site.node.ip(f"link add {kubeproxy.IPVS_DEVICE} type dummy")
        for address in wanted.addresses:
            site.node.ip(f"address add {address}/32 dev {kubeproxy.IPVS_DEVICE}")
        return _takes(site, "ipset restore", wanted.sets) and _takes(
            site, "iptables-restore", wanted.rules
        )

    def state(self, variant: str) -> StateDir:
        """Return the state directory of its agent."""
        return StateDir(self.agents[variant].paths.state)

    @property
    def cases(self) -> list[Case]:
        """Yield all variants and places that are compared."""
        return [(variant, place) for place in PLACES for variant in self.sites]


def _takes(site: Site, command: str, text: str) -> bool:
    """Return whether the kernel accepted it."""
    words = [*site.node.enter, *command.split()]
    return not subprocess.run(words, input=text, text=True, check=False).returncode


def _detecting() -> tuple[str, ...]:
    return "--cluster-cidr", PODS


_PIPE = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
