# SPDX-License-Identifier: Apache-2.0
"""The devices of this machine: which are served, their addresses for NodePorts and masquerade."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from fnmatch import translate
from functools import cache
from itertools import chain

from msgspec import Struct

from ebpflb.model import addresses, nodes
from ebpflb.model.addresses import Address, Family, Network

# The addresses of this machine that serve NodePorts (kube-proxy.md 8).
#
# ``option`` is --nodeport-addresses: CIDRs and words, as from kube-proxy 1.37 on (KEP-6032).
# Loopback is not decided here: the datapath serves it to the node's own processes only, always.

PRIMARY = ("primary",)  # the default of nftables mode, and of ebpflb
_WORDS = {
    PRIMARY[0]: (),  # the Node's own addresses
    "localhost": ("127.0.0.0/8", "::1/128"),
    "all": ("0.0.0.0/0", "::/0"),
}


def is_word(entry: str) -> bool:
    """Whether an entry of --nodeport-addresses is a word, which stands for both families."""
    return entry in _WORDS


def served_addresses(
    here: Iterable[Address], option: tuple[str, ...], primary: dict[Family, Address]
) -> frozenset[Address]:
    """Return the interface addresses that serve NodePorts.

    A family without an entry in ``option``, or whose primary address is unknown, is served on all
    its addresses. Raises ValueError for an entry that is not a CIDR.
    """
    allowed = allowed_networks(option, primary)
    return frozenset(
        address
        for address in here
        if not address.is_loopback and _allows(allowed[addresses.family(address)], address)
    )


def health_check_addresses(
    here: Iterable[Address], option: tuple[str, ...], primary: dict[Family, Address]
) -> dict[Family, frozenset[Address]]:
    """Return where health-check node ports listen (kube-proxy.md 10); missing families: anywhere.

    Unlike NodePorts they also listen on loopback if ``option`` contains it. Raises ValueError too.
    """
    restricted = {f: allowed for f, allowed in allowed_networks(option, primary).items() if allowed}
    everywhere = {f for f, allowed in restricted.items() if any(n.prefixlen == 0 for n in allowed)}
    return {
        family: frozenset(each for each in here if any(each in network for network in allowed))
        for family, allowed in restricted.items()
        if family not in everywhere
    }


def allowed_networks(
    option: tuple[str, ...], primary: dict[Family, Address]
) -> dict[Family, list[Network]]:
    """Return the CIDRs by family; an empty list allows every address."""
    texts = chain.from_iterable(_texts(entry, primary) for entry in option)
    parsed = [addresses.parse_network(t if "/" in t else _single(t)) for t in texts]
    return {f: [n for n in parsed if addresses.family(n) == f] for f in Family}


def _texts(entry: str, primary: dict[Family, Address]) -> Iterable[str]:
    """Return the CIDRs, or bare addresses, that an entry stands for."""
    return map(str, primary.values()) if entry in PRIMARY else _WORDS.get(entry, (entry,))


def _single(text: str) -> str:
    return f"{text}/{addresses.parse_address(text).max_prefixlen}"


def _allows(allowed: list[Network], address: Address) -> bool:
    return not allowed or any(address in network for network in allowed)


AddressByFamily = dict[Family, Address]


class Device(Struct, frozen=True):
    """One network device, with its addresses in the kernel's order."""

    index: int
    name: str
    loopback: bool
    link_header: bool  # packets begin with an Ethernet header
    master: int  # ifindex of its bridge, bond or VRF; 0: none
    addresses: tuple[Address, ...]
    sources: tuple[Address, ...]  # usable for masquerading: global, primary, in use
    kind: str = ""  # the kernel's name of a virtual device's kind, such as "bridge" or "veth"
    hairpin: bool = False  # of a bridge's port: a frame may leave by its ingress port
    plain_bridge: bool = False  # netfilter does not run at its ports, nor does it filter by VLAN
    mac: str = ""  # such as "02:00:00:00:00:01"; empty without an Ethernet header
    number: int = 0  # another than that of a removed device which had the same index


Devices = tuple[Device, ...]
Addresses = tuple[Address, ...]

KINDS_OF_PODS = frozenset({"veth", "netkit"})
# A shaper's queue. A filter behind our ingress sends packets through it and back to the same place
# of the same device, so a program at its egress would only remove the choice that they carry.
_SHAPER = "ifb"
_KINDS_OF_GUESTS = KINDS_OF_PODS | {"tun"}  # of pods and virtual machines
# Masters that forward frames unchanged: a frame for another host is so at their ports too.
_BONDS = frozenset({"bond", "team"})
_NO_SWITCHES = _BONDS | {"vrf"}


_WIRES = KINDS_OF_PODS | _BONDS | {"", "vlan", "macvlan", "ipvlan"}


def outer(devices: Devices, pods: Collection[Network]) -> Iterator[Device]:
    """Yield the devices of which the kind and the addresses say that other machines are there:
    none of overlays, containers and ``pods``, whose addresses are in these ranges.
    """
    wired = {it.master for it in devices if it.kind in _WIRES - KINDS_OF_PODS}
    for device in devices:
        is_wire = device.kind in _WIRES or (device.kind == "bridge" and device.index in wired)
        is_of_pods = any(at in net for at in device.sources for net in pods)
        if device.mac and device.sources and is_wire and not is_of_pods:
            yield device


def check_pattern(pattern: str) -> None:
    """Raises ValueError, with a message for the operator, for an impossible device name."""
    bare = pattern.removeprefix("!")
    if not bare or "/" in bare or any(letter.isspace() for letter in bare):
        raise ValueError(f'"{pattern}" is not a pattern of device names')


def served(
    devices: Collection[Device], patterns: Iterable[str], programmed: Collection[int] = ()
) -> Devices:
    """Return all devices, or those that a pattern names; '!' excludes devices.

    Loopback and shapers' queues are never served.

    A port of a bond or bridge that is served instead (``masters_for_ports``) is left out.
    ``programmed``: indexes of the devices that have programs now. A port that has programs keeps
    them until its master has programs too.
    """
    named = tuple(_named(devices, tuple(patterns)))
    replacing = masters_for_ports(devices).intersection(device.index for device in named)
    waiting = replacing.difference(programmed)
    return tuple(
        device
        for device in named
        if device.master not in replacing
        or (device.master in waiting and device.index in programmed)
    )


def masters_for_ports(devices: Collection[Device]) -> set[int]:
    """Return the bonds and bridges where programs see everything that they would see at the ports.

    The kernel hands the packets of a bond's members to the bond before anything else looks at them,
    and the packets of a bridge's only port to the bridge. But if netfilter runs at the port, a
    choice at the bridge would come too late. With several ports, frames between two of them bypass
    the bridge's own programs, such as replies from a pod or virtual machine to a client behind the
    uplink. A pod or virtual machine may soon have neighbours, so its port keeps the programs.
    """
    ports = defaultdict[int, list[Device]](list)
    for device in devices:
        ports[device.master].append(device)
    return {
        each.index
        for each in devices
        if each.kind in _BONDS or (each.plain_bridge and _are_one_uplink(ports[each.index]))
    }


def _are_one_uplink(ports: list[Device]) -> bool:
    return len(ports) == 1 and not ports[0].hairpin and ports[0].kind not in _KINDS_OF_GUESTS


def _named(devices: Iterable[Device], patterns: tuple[str, ...]) -> Iterator[Device]:
    selected = _any([p for p in patterns if not p.startswith("!")] or ["*"])
    excluded = _any([p[1:] for p in patterns if p.startswith("!")])
    for device in devices:
        may_be = not device.loopback and device.kind != _SHAPER
        if may_be and selected(device.name) and not excluded(device.name):
            yield device


def by_importance(devices: Devices, node: Mapping[Family, Address]) -> tuple[Devices, Devices]:
    """Return the node's own devices, the most important first, and the others, mostly pods'.

    Own devices have an address of the Node, or are a port of such a device; then follow physical
    devices, and those with another address. Pods' devices may have an address too; the newest pod,
    which is about to start, comes first.
    """
    uplinks, own, others = of_node(devices, node), [], []
    for device in devices:
        if device in uplinks:
            continue
        if device.kind not in KINDS_OF_PODS and (device.sources or not device.kind):
            own.append(device)
        else:
            others.append(device)
    return (*uplinks, *own), tuple(reversed(others))


def of_node(devices: Devices, node: Mapping[Family, Address]) -> Devices:
    """Return the devices that have an address of the Node, or are a port of such a device."""
    known, found = by_index(devices), []
    for device in devices:
        above = [device] if device.kind in KINDS_OF_PODS else with_masters(device, known)
        if any(address in node.values() for each in above for address in each.addresses):
            found.append(device)
    return tuple(found)


def uplinks(devices: Devices, node: Mapping[Family, Address]) -> dict[Device, Addresses]:
    """Return the node's own devices that have addresses, or are ports of such, with these."""
    known, (own, _) = by_index(devices), by_importance(devices, node)
    found = {
        device: tuple(it for each in with_masters(device, known) for it in each.sources)
        for device in own
    }
    return {device: addresses for device, addresses in found.items() if addresses}


def masquerade_addresses(
    devices: Devices, node: Mapping[Family, Address]
) -> dict[int, AddressByFamily]:
    """Return the addresses that each device masquerades to, by ifindex; families may be missing.

    A device without an address of its own, such as a bridge's port, uses its master's, else the
    node's primary one (see ``node_addresses``).
    """
    fallback, known = node_addresses(devices, node), by_index(devices)

    @cache  # the ports of a bridge, hundreds on some nodes, have the same
    def merged(*sources: tuple[Address, ...]) -> AddressByFamily:
        return _first_of([*map(nodes.primary_addresses, sources), fallback])

    return {
        device.index: merged(
            *[each.sources for each in with_masters(device, known) if each.sources]
        )
        for device in devices
    }


def own_addresses(here: Iterable[Address]) -> frozenset[Address]:
    """Return the node's addresses that a service may also have: neither loopback nor link-local."""
    return frozenset(each for each in here if not (each.is_loopback or each.is_link_local))


def node_addresses(devices: Devices, node: Mapping[Family, Address]) -> AddressByFamily:
    """Return the Node's addresses if assigned here, else any device's except loopback's."""
    assigned = {address for device in devices for address in device.addresses}
    known = {family: address for family, address in node.items() if address in assigned}
    others = (nodes.primary_addresses(device.sources) for device in devices if not device.loopback)
    return _first_of([known, *others])


def by_index(devices: Devices) -> dict[int, Device]:
    return {device.index: device for device in devices}


def with_masters(device: Device, known: Mapping[int, Device]) -> list[Device]:
    """Return the device, its master, the master's master, and so on."""
    chain = [device]
    while (master := known.get(chain[-1].master)) and master not in chain:
        chain.append(master)
    return chain


def is_host_only(device: Device, known: Mapping[int, Device]) -> bool:
    """Whether no host behind the device can have another MAC address than the device.

    False if the device is a port of a bridge, of Open vSwitch, or of an unknown master.
    """
    kinds = _kinds_of_masters(device, known)
    return kinds is not None and kinds <= _NO_SWITCHES


def is_bridged(device: Device, known: Mapping[int, Device]) -> bool:
    """Whether the device is a port of a kernel bridge, and of no other switch.

    Then a frame is for this machine only if a device of the machine has the frame's MAC address.
    """
    kinds = _kinds_of_masters(device, known)
    return kinds is not None and "bridge" in kinds and kinds <= _NO_SWITCHES | {"bridge"}


def _kinds_of_masters(device: Device, known: Mapping[int, Device]) -> set[str] | None:
    """Return the kinds of the masters; None if one of the masters is unknown."""
    if not device.master:
        return set()
    chain = with_masters(device, known)
    return None if chain[-1].master else {each.kind for each in chain[1:]}


def _first_of(candidates: Iterable[AddressByFamily]) -> AddressByFamily:
    merged: AddressByFamily = {}
    for candidate in candidates:
        merged = candidate | merged
    return merged


def _any(patterns: Iterable[str]) -> Callable[[str], object]:
    """Return a test whether one of the patterns matches a name; none matches if there are none."""
    return re.compile("|".join(map(translate, patterns)) or r"(?!)").match


# Which traffic comes from pods of the cluster (kube-proxy.md 5.2).


class LocalMode(StrEnum):
    CLUSTER_CIDR = "ClusterCIDR"
    NODE_CIDR = "NodeCIDR"
    BRIDGE = "BridgeInterface"
    NAME_PREFIX = "InterfaceNamePrefix"


class LocalDetector(Struct, frozen=True):
    """One mode and its parameters; by default no traffic counts as from pods."""

    mode: LocalMode = LocalMode.CLUSTER_CIDR
    cluster_cidrs: tuple[Network, ...] = ()
    bridge: str = ""
    name_prefix: str = ""

    def networks(self, pod_cidrs: tuple[Network, ...]) -> tuple[Network, ...]:
        """Return the source addresses of pods; ``pod_cidrs`` are those of this node."""
        by_mode = {LocalMode.CLUSTER_CIDR: self.cluster_cidrs, LocalMode.NODE_CIDR: pod_cidrs}
        return by_mode.get(self.mode, ())

    @property
    def by_device(self) -> bool:
        return self.mode in (LocalMode.BRIDGE, LocalMode.NAME_PREFIX)

    def is_pod_device(self, device: Device, known: Mapping[int, Device]) -> bool:
        """Whether traffic that enters by the device, or by its master, comes from pods."""
        if not self.by_device:
            return False
        names = [each.name for each in with_masters(device, known)]
        if self.mode is LocalMode.BRIDGE:
            return self.bridge in names
        return any(n.startswith(self.name_prefix) for n in names)
