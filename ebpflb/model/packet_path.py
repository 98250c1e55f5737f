# SPDX-License-Identifier: Apache-2.0
"""Which engine translates new flows of packets, and why: netfilter or the flow tables.

A flow stays with the engine that opened it until the flow ends.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from ebpflb.errors import NodeError
from ebpflb.model.addresses import Address, Family, Network, family
from ebpflb.model.devices import Device, Devices
from ebpflb.model.devices import served as served_devices

# The mark of packets that the flow tables have translated at ingress.
#
# netfilter cannot distinguish them from packets sent to the endpoint directly. A rule in FORWARD or
# INPUT can do so by the mark, as with kube-proxy by its mark 0x4000 or by ``ct status dnat``.

_BITS = 32


class PacketMark(NamedTuple):
    """The bits in ``mask`` are set to those of ``mark``; with mask 0 packets are not marked."""

    mark: int = 0
    mask: int = 0

    def __str__(self) -> str:
        """The inverse of ``parse_mark``."""
        return f"{self.mark:#x}/{self.mask:#x}" if self.mask else ""


OFF = PacketMark()


def parse_mark(text: str) -> PacketMark:
    """MARK/MASK, decimal or with 0x; MARK alone sets all bits; "" is OFF. Raises ValueError."""
    if not text:
        return OFF
    mark, slash, mask = text.partition("/")
    try:
        found = PacketMark(int(mark, 0), int(mask, 0) if slash else (1 << _BITS) - 1)
    except ValueError as error:
        raise ValueError(f'"{text}" is not MARK/MASK such as 0x4000/0x4000') from error
    if not 0 < found.mask < 1 << _BITS or found.mark & ~found.mask or found.mark <= 0:
        raise ValueError(f'"{text}": MARK must be bits of MASK, and neither may be zero')
    return found


# Whether a bridge bypasses netfilter's translation for pods.
#
# A pod's request to a service passes the node's IP layer, where netfilter translates it. If the
# endpoint is a pod on the same bridge, its answer goes to the client's hardware address, passes
# only the bridge, and is not translated back. So the netfilter engine, like kube-proxy, needs
# bridges that hand packets to netfilter (br_netfilter, with the sysctls below at 1). The flow
# tables do not need this: their programs run at the bridge's ports.
#
# With br_netfilter such a request is translated on the bridge, and forwarded by the bridge. A pod
# that connects to itself through its service therefore needs a port that may send a frame back
# where it came from (hairpin mode; promiscuous mode of the bridge does not help). kube-proxy needs
# this too.

SYSCTLS = {
    Family.IPV4: "net/bridge/bridge-nf-call-iptables",
    Family.IPV6: "net/bridge/bridge-nf-call-ip6tables",
}
_POD_PORTS = ("veth", "tun")  # kinds of devices that lead to pods and to virtual machines
# The names of bridges of Docker, libvirt and Podman, whose containers are no pods.
_OTHERS = re.compile(r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}|virbr\d+|podman\d+|cni-podman\d+")


def unsuited(
    devices: Devices,
    pods: Collection[Network],
    calls: Mapping[Family, bool],
    patterns: Iterable[str] = (),
) -> str | None:
    """Return why the netfilter engine should not be used here, or None if it may be used.

    The text names bridges, ports and sysctls. ``pods`` are the pods' networks, () if they are
    unknown; ``calls`` says for each family whether bridges hand packets to netfilter; ``patterns``
    are those of --devices.
    """
    bridges = list(bridges_of_pods(devices, pods))
    handing = {b.index: b.name for b in bridges if any(calls[f] for f in bridged_families(b))}
    ports = [each for each in devices if each.master in handing and each.kind in _POD_PORTS]
    return (
        _past_conntrack(bridges, calls)
        or _left_out(ports, handing, served_devices(devices, patterns))
        or _without_hairpin([each for each in ports if not each.hairpin], handing)
    )


def _left_out(ports: list[Device], handing: Mapping[int, str], served: Devices) -> str | None:
    """Return the problem of an unserved port of a bridge.

    Netfilter runs at the port, before the program at the bridge could choose an endpoint.
    """
    indexes = {device.index for device in served}
    for port in ports:
        if port.index not in indexes:
            bridge = handing[port.master]
            return f"--devices leaves out {port.name}, a port of the bridge {bridge} for a pod"
    return None


def _past_conntrack(bridges: Collection[Device], calls: Mapping[Family, bool]) -> str | None:
    found = {
        bridge.name: [f for f in Family if not calls[f] and f in bridged_families(bridge)]
        for bridge in bridges
    }
    names = [name for name, missing in found.items() if missing]
    if not names:
        return None
    sysctls = {SYSCTLS[f].replace("/", ".") for missing in found.values() for f in missing}
    one = f"pods on the bridge {names[0]}" if len(names) == 1 else f"pods on {' and '.join(names)}"
    wanted = " and ".join(f"{name}=1" for name in sorted(sysctls))
    return f"{one} answer each other without conntrack (modprobe br_netfilter; {wanted})"


def _without_hairpin(ports: list[Device], handing: Mapping[int, str]) -> str | None:
    """Return the problem of a port without hairpin mode, if br_netfilter is on.

    Without br_netfilter the node itself sends the request through the bridge.
    """
    if not ports:
        return None
    more = f" and {len(ports) - 1} more" if len(ports) > 1 else ""
    return (
        f"a pod at {ports[0].name}{more} on the bridge {handing[ports[0].master]} cannot reach "
        "itself through a Service without hairpin mode on its port"
        f" (hairpinMode of the CNI; ip link set {ports[0].name} type bridge_slave hairpin on)"
    )


def bridges_of_pods(devices: Devices, pods: Collection[Network]) -> Iterator[Device]:
    """Yield the bridges with ports that lead to pods."""
    with_ports = {device.master for device in devices if device.kind in _POD_PORTS}
    for device in devices:
        if device.kind == "bridge" and device.index in with_ports and _may_have_pods(device, pods):
            yield device


def _may_have_pods(bridge: Device, pods: Collection[Network]) -> bool:
    """Decide by the bridge's addresses if pods' networks are known, else by its name."""
    if pods and bridge.sources:
        return any(_in(address, pods) for address in bridge.sources)
    return _OTHERS.fullmatch(bridge.name) is None


def bridged_families(bridge: Device) -> set[Family]:
    """Return the families of its addresses; both if it has none, and pods use another gateway."""
    return {family(address) for address in bridge.sources} or set(Family)


def _in(address: Address, networks: Collection[Network]) -> bool:
    return any(address in network for network in networks)


# conntrack's own timeouts of UDP, in seconds: nf_conntrack_udp_timeout and ..._timeout_stream.

KERNEL_UDP_TIMEOUT, KERNEL_UDP_STREAM_TIMEOUT = 30, 120


class Engine(StrEnum):
    """``NETFILTER``: the kernel's NAT, with an nftables table. ``FLOWS``: ebpflb's own tables."""

    NETFILTER = "netfilter"
    FLOWS = "flows"


AUTO = "auto"
PACKET_PATHS = (AUTO, *(str(each) for each in Engine))  # of --packet-path

_AS_SET = "chosen by --packet-path"
_WORKS = "the kernel's NAT works with nftables"


class PacketPath(Struct, frozen=True):
    """The engine in force; ``reason`` is one sentence for the operator, without a full stop."""

    engine: Engine
    reason: str


def decide(wanted: str, *, missing: str | None, unsuited: str | None = None) -> PacketPath:
    """Return the engine for one of PACKET_PATHS.

    ``missing`` says why the netfilter engine cannot work on this node, ``unsuited`` why it should
    not be used here. An unsuited engine is used only if the operator wants it. Raises NodeError if
    the wanted engine cannot work.
    """
    if wanted == Engine.FLOWS:
        return PacketPath(Engine.FLOWS, _AS_SET)
    if wanted == Engine.NETFILTER:
        if missing:
            raise NodeError(f"--packet-path=netfilter cannot work on this node: {missing}")
        return PacketPath(
            Engine.NETFILTER, f"{_AS_SET}, although {unsuited}" if unsuited else _AS_SET
        )
    obstacle = missing or unsuited
    if obstacle:
        return PacketPath(Engine.FLOWS, obstacle)
    return PacketPath(Engine.NETFILTER, _WORKS)
