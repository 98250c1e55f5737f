# SPDX-License-Identifier: Apache-2.0
"""Further pod networks, beside that of ebpflb.lab.cni: each as one kind of CNI plugin builds it.

Overlay      as the bridge, but packets to other nodes' pods are sent in VXLAN
Routed       each pod has a veth and a route; the node answers all neighbour requests (ARP, ND)
Ptp          as the plugin of that name: each veth has the gateway's address
Netkit       a pair of netkit devices for each pod instead of a veth pair, as in Cilium
Children     pods are macvlan or ipvlan devices of one parent; so is the node's own, their gateway
Beside       as Children, but only pods of one node reach each other so: all else goes by a veth
SourceRules  as AWS's VPC CNI: rules lead what a pod sends to the table of its network interface
SecondUplink the same, and the pods' addresses belong to a second interface of the node
WireGuard    packets to other nodes' pods are sent in WireGuard
Vrf          the node's uplink is in a VRF
Bond         the node's uplink is a member of a bond
Vlan         the node's uplink is a VLAN's device
BridgeUplink the node's uplink is the only port of a bridge
"""

import errno
from pathlib import Path

from pyroute2.iproute import IPRoute
from pyroute2.netlink import nla
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.generic.wireguard import WireGuard as WireGuardSocket
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from ebpflb.errors import NodeError
from ebpflb.kernel.node.namespaces import call_in
from ebpflb.lab import cni
from ebpflb.lab.netns import NETNS, Namespace
from ebpflb.lab.router import NODES, lasting_mac
from ebpflb.model.packet_path import SYSCTLS

BOTH = (False, True)
TABLE = 10
SECOND = 100  # the number of a node's second interface is so much higher
MARK = 0x80
NETKIT = {"MODE": 5, "SCRUB": 6, "PEER_SCRUB": 7}
_L2, _L3 = 0, 1
REPLIES_BY_ETH0 = f"""
    table inet aws {{
        chain prerouting {{
            type filter hook prerouting priority mangle;
            iifname "eth0" fib daddr type local ct mark set {MARK}
            iifname "veth*" meta mark set ct mark
        }}
    }}"""
WIREGUARD_PORT = 51820
# Node -> private and public key. Anyone may know them.
KEYS = {
    1: (
        "mI1yCae3NUA2jrAeLWjdC7XziefN4Ai2j0a3oJvjw0I=",
        "tyE+2xvjw+A3qP8c9PB+9eMnawCgJSL8caCFD9B/6lw=",
    ),
    2: (
        "mAAjMPmr1H6kUgdxk02lGZ15fj7Qi7ggzuJIw8HERmw=",
        "DjiPq+J0QKw8ZRKZ/0HmtbeE399fbnYYlchNUNb7Slc=",
    ),
}


class Overlay(cni.Bridge):
    """A VXLAN network as in Flannel: a node's VXLAN address is the first address of its pod
    network.

    Before Linux 5.14 this is a broadcast address, for which no host answers, so the nodes have
    entries for each other's link address.
    """

    mtu = 1450

    def reach(self, host: Namespace, node: int, other: int) -> None:
        here, there = NODES.addresses(node)[0], NODES.addresses(other)[0]
        link = f"link add vxlan0 address {_vxlan_link(node)} type vxlan"
        host.ip(f"{link} id 1 local {here} remote {there} dstport 8472")
        host.ip(f"link set vxlan0 up mtu {self.mtu}")
        for mine, its, whole in zip(_base(node), _base(other), cni.network(other), strict=True):
            host.ip(f"address add {mine} dev vxlan0")
            host.ip(f"neighbour add {its} lladdr {_vxlan_link(other)} dev vxlan0")
            host.ip(f"route add {whole} via {its} dev vxlan0 onlink")


def _vxlan_link(node: int) -> str:
    return f"02:00:00:00:01:{node:02x}"


class Routed:
    """A network with routes as in Calico: a pod has a gateway address, for which the node answers
    on every veth.
    """

    gateways = ("169.254.1.1", "fe80::1")

    def prepare(self, host: Namespace, node: int) -> None:
        """Do nothing."""

    def plug(self, host: Namespace, node: int, pod: Namespace, number: int) -> None:
        veth = f"veth{number}"
        host.ip(f"link add {veth} type veth peer name eth0 netns {pod.netns}")
        self.connect(host, veth, pod, cni.addresses(node, number))

    def connect(
        self, host: Namespace, device: str, pod: Namespace, addresses: tuple[str, str]
    ) -> None:
        """Give the pod's eth0 addresses and routes; ``device`` is the other end."""
        host.sysctl(f"net.ipv4.conf.{device}.proxy_arp", 1)
        host.ip(f"link set {device} up", f"address add {self.gateways[1]}/64 dev {device}")
        pod.ip("link set eth0 up")
        for address, gateway in zip(addresses, self.gateways, strict=True):
            pod.ip(f"address add {address} dev eth0")
            pod.ip(f"route add default via {gateway} dev eth0 onlink")
            host.ip(f"route add {address} dev {device}")

    def reach(self, host: Namespace, node: int, other: int) -> None:
        cni.Bridge().reach(host, node, other)


def _base(node: int) -> tuple[str, str]:
    return f"10.244.{node}.0", f"fd00:244:{node}::"


V4_GATEWAY, V6_GATEWAY = Routed.gateways


class Ptp(Routed):
    """A network where a pod knows the gateway by its route, and no host answers ARP or ND for
    another one.
    """

    def plug(self, host: Namespace, node: int, pod: Namespace, number: int) -> None:
        veth = f"veth{number}"
        host.ip(
            f"link add {veth} type veth peer name eth0 netns {pod.netns}", f"link set {veth} up"
        )
        pod.ip("link set eth0 up")
        gateways = cni.addresses(node, 1)
        for address, gateway in zip(cni.addresses(node, number), gateways, strict=True):
            host.ip(f"address add {gateway} dev {veth}", f"route add {address} dev {veth}")
            pod.ip(f"address add {address} dev eth0", f"route add {gateway} dev eth0")
            pod.ip(f"route add default via {gateway} dev eth0")


class Netkit(Routed):
    """Pods with netkit devices in mode L3, the kernel's default: no neighbour is asked for. Unless
    packets are scrubbed, they keep mark and priority on their way between pod and node.
    """

    def __init__(self, *, scrubbed: bool = True) -> None:
        self.scrubbed = scrubbed

    def plug(self, host: Namespace, node: int, pod: Namespace, number: int) -> None:
        device = f"pod{number}"
        call_in(NETNS / host.netns, lambda: add_netkit(device, _L3, scrubbed=self.scrubbed))
        host.ip(
            f"link set nk0 netns {pod.netns} name eth0",  # the kernel's name for the other end
            f"link set {device} up",
        )
        pod.ip("link set eth0 up")
        for address, v6 in zip(cni.addresses(node, number), BOTH, strict=True):
            pod.ip(f"address add {address} dev eth0")
            pod.ip("route add default dev eth0", v6=v6)
            host.ip(f"route add {address} dev {device}")


class NetkitL2(Routed):
    """Pods with netkit devices in mode L2, otherwise as Routed."""

    def plug(self, host: Namespace, node: int, pod: Namespace, number: int) -> None:
        device = f"pod{number}"
        call_in(NETNS / host.netns, lambda: add_netkit(device, _L2))
        host.ip(f"link set nk0 netns {pod.netns} name eth0")
        self.connect(host, device, pod, cni.addresses(node, number))


class NetkitData(nla):  # type: ignore[misc]
    """The attributes of linux/if_link.h, which pyroute2 0.9 does not have."""

    prefix = "IFLA_NETKIT_"
    nla_map = tuple((number, f"IFLA_NETKIT_{name}", "uint32") for name, number in NETKIT.items())


def add_netkit(device: str, mode: int, *, scrubbed: bool = True) -> None:
    """Add the devices. Raises NodeError if the kernel has no netkit."""
    values = {"MODE": mode, "SCRUB": int(scrubbed), "PEER_SCRUB": int(scrubbed)}
    data = {"attrs": [(f"IFLA_NETKIT_{name}", value) for name, value in values.items()]}
    info = [("IFLA_INFO_KIND", "netkit"), ("IFLA_INFO_DATA", data)]
    ifinfmsg.ifinfo.register_link_kind(module={"netkit": NetkitData})
    with IPRoute() as route:
        try:
            route.link("add", ifname=device, IFLA_LINKINFO={"attrs": info})
        except NetlinkError as error:
            if error.code == errno.EOPNOTSUPP:
                raise NodeError("Unknown device type") from error
            raise


class Children(Routed):
    """Pods with child devices of this ``kind`` and mode. The parent leads nowhere."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def prepare(self, host: Namespace, node: int) -> None:
        host.ip(
            "link add net1 type veth peer name net2",
            "link set net1 up",
            "link set net2 up",
            f"link add shim0 link net1 type {self.kind}",
            "link set shim0 up",
            f"address add {V4_GATEWAY}/32 dev shim0",
            f"address add {V6_GATEWAY}/64 dev shim0",
        )

    def plug(self, host: Namespace, node: int, pod: Namespace, number: int) -> None:
        host.ip(
            f"link add pod{number} link net1 type {self.kind}",
            f"link set pod{number} netns {pod.netns} name eth0",
        )
        pod.ip("link set eth0 up")
        for address, gateway in zip(cni.addresses(node, number), self.gateways, strict=True):
            pod.ip(f"address add {address} dev eth0")
            pod.ip(f"route add default via {gateway} dev eth0 onlink")
            host.ip(f"route add {address} dev shim0")


class Beside(Children):
    """Pods as in Spiderpool, and Lyft's plugin for AWS: the pod's address is that of its child
    device, and the node knows the link address of the veth.
    """

    def prepare(self, host: Namespace, node: int) -> None:
        host.ip("link add net1 type veth peer name net2", "link set net1 up", "link set net2 up")

    def plug(self, host: Namespace, node: int, pod: Namespace, number: int) -> None:
        veth, link = f"veth{number}", lasting_mac(number)
        host.ip(
            f"link add pod{number} link net1 type {self.kind}",
            f"link set pod{number} netns {pod.netns} name eth0",
            f"link add {veth} type veth peer name eth1 address {link} netns {pod.netns}",
            f"link set {veth} up",
            f"address add {V6_GATEWAY}/64 dev {veth}",
        )
        host.sysctl(f"net.ipv4.conf.{veth}.proxy_arp", 1)
        pod.ip("link set eth0 up", "link set eth1 up")
        both = zip(cni.addresses(node, number), self.gateways, (24, 64), strict=True)
        for address, gateway, length in both:
            pod.ip(f"address add {address}/{length} dev eth0")
            pod.ip(f"route add default via {gateway} dev eth1 onlink")
            host.ip(
                f"route add {address} dev {veth}",
                f"neighbour add {address} lladdr {link} dev {veth} nud permanent",
            )


class SourceRules(Routed):
    """Routing rules for pods' sources. The gateway's link address is written into each pod, so no
    one asks for it.
    """

    def prepare(self, host: Namespace, node: int) -> None:
        for gateway in NODES.gateways:
            host.ip(f"route add default via {gateway} dev eth0 table {TABLE}")

    def reach(self, host: Namespace, node: int, other: int) -> None:
        """Add routes like a network that knows where each pod is: at the other node, in both
        tables.
        """
        for there, gateway in zip(cni.network(other), NODES.addresses(other), strict=True):
            for table in ("main", TABLE):
                host.ip(f"route add {there} via {gateway} table {table}")

    def plug(self, host: Namespace, node: int, pod: Namespace, number: int) -> None:
        veth, link = f"veth{number}", lasting_mac(number)
        host.ip(
            f"link add {veth} address {link} type veth peer name eth0 netns {pod.netns}",
            f"link set {veth} up",
        )
        pod.ip("link set eth0 up")
        for address, gateway in zip(cni.addresses(node, number), self.gateways, strict=True):
            pod.ip(f"address add {address} dev eth0")
            pod.ip(f"neighbour add {gateway} lladdr {link} dev eth0 nud permanent")
            pod.ip(f"route add default via {gateway} dev eth0 onlink")
            host.ip(f"route add {address} dev {veth}")
            host.ip(
                f"rule add to {address} lookup main priority 512",
                f"rule add from {address} lookup {TABLE} priority 1536",
                v6=":" in address,
            )


class SecondUplink(SourceRules):
    """A node with a second elastic network interface: eth1 has an address of its own, pods' packets
    come and go there, and the network drops packets from any other address. Replies of the node's
    own addresses stay with eth0, by the rules that AWS's plugin writes for them.
    """

    def prepare(self, host: Namespace, node: int) -> None:
        cable, router = f"second{node}", Namespace(f"{host.netns.rpartition('-')[0]}-router")
        router.ip(
            f"link add {cable} type veth peer name eth1 netns {host.netns}",
            f"link set {cable} master {NODES.name} up",
        )
        for name in ("eth0", "eth1"):
            host.sysctl(f"net.ipv4.conf.{name}.arp_ignore", 1)
            host.sysctl(f"net.ipv4.conf.{name}.rp_filter", 2)
        host.ip("link set eth1 up", f"rule add fwmark {MARK}/{MARK} lookup main priority 1024")
        host.ip(f"rule add fwmark {MARK}/{MARK} lookup main priority 1024", v6=True)
        for address, gateway in zip(NODES.addresses(SECOND + node), NODES.gateways, strict=True):
            host.ip(
                f"address add {address} dev eth1",
                f"route add {gateway} dev eth1 table {TABLE}",
                f"route add default via {gateway} dev eth1 table {TABLE}",
            )
        host.nft(REPLIES_BY_ETH0)
        v4, v6 = (
            ", ".join(each)
            for each in zip(cni.network(node), NODES.addresses(SECOND + node), strict=True)
        )
        router.nft(f"""
            table netdev second{node} {{
                chain come {{
                    type filter hook ingress device {cable} priority 0;
                    ip saddr != {{ {v4} }} drop
                    ip6 saddr != {{ fe80::/10, {v6} }} drop
                }}
            }}""")

    def reach(self, host: Namespace, node: int, other: int) -> None:
        both = zip(cni.network(other), NODES.addresses(SECOND + other), strict=True)
        for there, gateway in both:
            host.ip(
                f"route add {there} via {gateway} dev eth0",
                f"route add {gateway} dev eth1 table {TABLE}",
                f"route add {there} via {gateway} dev eth1 table {TABLE}",
            )


class WireGuard(Routed):
    """A WireGuard device between nodes. It has no link header; its address is the first one of the
    node's pod network.
    """

    mtu = 1420

    def plug(self, host: Namespace, node: int, pod: Namespace, number: int) -> None:
        super().plug(host, node, pod, number)
        host.ip(f"link set veth{number} mtu {self.mtu}")
        pod.ip(f"link set eth0 mtu {self.mtu}")

    def reach(self, host: Namespace, node: int, other: int) -> None:
        host.ip("link add wg0 type wireguard")
        call_in(NETNS / host.netns, lambda: self._connect(node, other))
        host.ip("link set wg0 up")
        for mine, whole in zip(cni.network(node), cni.network(other), strict=True):
            base = mine.partition("/")[0]
            host.ip(f"address add {base} dev wg0", f"route add {whole} dev wg0 src {base}")

    def _connect(self, node: int, other: int) -> None:
        peer = {
            "public_key": KEYS[other][1],
            "endpoint_addr": NODES.addresses(other)[0],
            "endpoint_port": WIREGUARD_PORT,
            "allowed_ips": list(cni.network(other)),
        }
        with WireGuardSocket() as wireguard:
            key = KEYS[node][0]
            wireguard.set("wg0", private_key=key, listen_port=WIREGUARD_PORT, peer=peer)


class Vrf(Routed):
    """An uplink in a VRF. Each of the two tables has routes into the other one, as the documents of
    Linux show it. The node has an address outside the VRF too: without one the kernel masquerades
    nothing there.
    """

    def prepare(self, host: Namespace, node: int) -> None:
        host.ip("link add own type dummy", "link set own up")
        host.ip(*(f"address add {address} dev own" for address in cni.addresses(node, 1)))
        host.sysctl("net.ipv6.conf.eth0.keep_addr_on_down", 1)
        host.ip(
            f"link add red type vrf table {TABLE}", "link set red up", "link set eth0 master red"
        )
        for gateway, network in zip(NODES.gateways, NODES.networks, strict=True):
            host.ip(f"route replace {network} dev eth0")
            host.ip(f"route add default via {gateway} dev eth0 table {TABLE}")
            host.ip(f"route replace default via {gateway} dev eth0")

    def plug(self, host: Namespace, node: int, pod: Namespace, number: int) -> None:
        super().plug(host, node, pod, number)
        for address in cni.addresses(node, number):
            host.ip(f"route add {address} dev veth{number} table {TABLE}")

    def reach(self, host: Namespace, node: int, other: int) -> None:
        for there, gateway in zip(cni.network(other), NODES.addresses(other), strict=True):
            for table in ("main", TABLE):
                host.ip(f"route add {there} via {gateway} dev eth0 table {table}")


class Bond(Routed):
    """An uplink that is a member of a bond, which has the addresses and routes."""

    def prepare(self, host: Namespace, node: int) -> None:
        host.ip(
            "link add bond0 type bond mode active-backup miimon 100",
            "link set eth0 down",
            "link set eth0 master bond0",
            "link set bond0 up",
        )
        move_addresses(host, node, "eth0", "bond0")


class Vlan(Routed):
    """An uplink at whose cable all frames have a VLAN's tag; ``tag`` sets up the switch's port."""

    def prepare(self, host: Namespace, node: int) -> None:
        host.ip("link add link eth0 name eth0.5 type vlan id 5", "link set eth0.5 up")
        move_addresses(host, node, "eth0", "eth0.5")

    @staticmethod
    def tag(router: Namespace, node: int) -> None:
        port = f"{NODES.name}{node}"
        router.ip(
            f"link set {port} nomaster",
            f"link add link {port} name {port}.5 type vlan id 5",
            f"link set {port}.5 master {NODES.name} up",
        )


class BridgeUplink(Routed):
    """An uplink that is the only port of a bridge, which has the addresses and routes; netfilter
    does not run at the port ``up0``.

    As a pod's veth may be a bridge's only port too, the port is a device of another kind, on top of
    eth0. The agent has to leave out eth0 (OPTIONS), because it stands for the cable.
    """

    OPTIONS = ("--devices", "!eth0")

    def prepare(self, host: Namespace, node: int) -> None:
        call_netfilter(host, calls=False)
        host.ip(
            f"link set eth0 address {lasting_mac(node)}",
            "link add up0 link eth0 type macvlan mode passthru",
            f"link add br0 address {lasting_mac(node)} type bridge",
            "link set up0 master br0 up",
            "link set br0 up",
        )
        move_addresses(host, node, "eth0", "br0")


def call_netfilter(host: Namespace, *, calls: bool) -> None:
    """Set whether bridges call netfilter at their ports, if the kernel has br_netfilter."""
    for name in SYSCTLS.values():
        if Path("/proc/sys", name).exists():
            host.sysctl(name.replace("/", "."), int(calls))


def move_addresses(host: Namespace, node: int, former: str, device: str) -> None:
    """Move the node's addresses and default routes to another device."""
    host.ip(f"address flush dev {former}")
    both = zip(NODES.addresses(node), NODES.gateways, (24, 64), strict=True)
    for address, gateway, length in both:
        host.ip(
            f"address add {address}/{length} dev {device}",
            f"route replace default via {gateway} dev {device}",
        )
