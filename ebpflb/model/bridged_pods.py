# SPDX-License-Identifier: Apache-2.0
"""Whether a bridge keeps pods from what netfilter translates for them.

A pod's request to a service passes the node's IP layer, where netfilter translates it. If the
endpoint is a pod on the same bridge, its answer goes to the client's hardware address, so it passes
only the bridge, and nothing puts the service's address back. Like kube-proxy, the engine netfilter
needs bridges that hand packets to netfilter (br_netfilter, with the sysctls below at 1). The flow
tables do not: their programs are at the bridge's ports.

With br_netfilter such a request is translated on the bridge, and sent on by the bridge. A pod that
reaches itself by its service therefore needs a port that sends a frame back where it came from
(hairpin mode; promiscuous mode of the bridge does not help). kube-proxy has the same need.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from ebpflb.model.addresses import Address, Family, Network, family
from ebpflb.model.devices import Device, Devices
from ebpflb.model.devices import served as served_devices

SYSCTLS = {
    Family.IPV4: "net/bridge/bridge-nf-call-iptables",
    Family.IPV6: "net/bridge/bridge-nf-call-ip6tables",
}
_POD_PORTS = ("veth", "tun")  # kinds of devices that lead to pods and to virtual machines
# Names of the bridges of Docker, libvirt and Podman, whose containers are no pods.
_OTHERS = re.compile(r"docker\d+|docker_gwbridge|br-[0-9a-f]{12}|virbr\d+|podman\d+|cni-podman\d+")


def unsuited(
    devices: Devices,
    pods: Collection[Network],
    calls: Mapping[Family, bool],
    patterns: Iterable[str] = (),
) -> str | None:
    """Why the engine netfilter should not be used here, naming bridges, ports and sysctls.

    None: it may be used. ``pods`` are the pods' networks, () if they are unknown; ``calls`` says
    for each family whether bridges hand packets to netfilter; ``patterns`` are those of --devices.
    """
    bridges = list(bridges_of_pods(devices, pods))
    return (
        _past_conntrack(bridges, calls)
        or _left_out(devices, bridges, calls, patterns)
        or _without_hairpin(devices, bridges, calls)
    )


def _left_out(
    devices: Devices,
    bridges: Collection[Device],
    calls: Mapping[Family, bool],
    patterns: Iterable[str],
) -> str | None:
    """Netfilter's turn comes at the port, before the program at the bridge could choose."""
    handing = {b.index: b.name for b in bridges if any(calls[f] for f in families(b))}
    served = {device.index for device in served_devices(devices, patterns)}
    for port in devices:
        if port.master in handing and port.kind in _POD_PORTS and port.index not in served:
            bridge = handing[port.master]
            return f"--devices leaves out {port.name}, a port of the bridge {bridge} for a pod"
    return None


def _past_conntrack(bridges: Collection[Device], calls: Mapping[Family, bool]) -> str | None:
    found = {
        bridge.name: [f for f in Family if not calls[f] and f in families(bridge)]
        for bridge in bridges
    }
    names = [name for name, missing in found.items() if missing]
    if not names:
        return None
    sysctls = {SYSCTLS[f].replace("/", ".") for missing in found.values() for f in missing}
    one = f"pods on the bridge {names[0]}" if len(names) == 1 else f"pods on {' and '.join(names)}"
    wanted = " and ".join(f"{name}=1" for name in sorted(sysctls))
    return f"{one} answer each other past conntrack (modprobe br_netfilter; {wanted})"


def _without_hairpin(
    devices: Devices, bridges: Collection[Device], calls: Mapping[Family, bool]
) -> str | None:
    """Only where br_netfilter is at work: else the node sends the request by the bridge itself."""
    handing = {b.index: b.name for b in bridges if any(calls[f] for f in families(b))}
    ports = [d for d in devices if d.master in handing and d.kind in _POD_PORTS and not d.hairpin]
    if not ports:
        return None
    more = f" and {len(ports) - 1} more" if len(ports) > 1 else ""
    return (
        f"a pod at {ports[0].name}{more} on the bridge {handing[ports[0].master]} does not reach"
        " itself by a service, without hairpin mode at its port"
        f" (hairpinMode of the CNI; ip link set {ports[0].name} type bridge_slave hairpin on)"
    )


def bridges_of_pods(devices: Devices, pods: Collection[Network]) -> Iterator[Device]:
    """Bridges with ports that lead to pods."""
    with_ports = {device.master for device in devices if device.kind in _POD_PORTS}
    for device in devices:
        if device.kind == "bridge" and device.index in with_ports and _may_have_pods(device, pods):
            yield device


def _may_have_pods(bridge: Device, pods: Collection[Network]) -> bool:
    """By its addresses if it has any and the networks of pods are known, else by its name."""
    if pods and bridge.sources:
        return any(_in(address, pods) for address in bridge.sources)
    return _OTHERS.fullmatch(bridge.name) is None


def families(bridge: Device) -> set[Family]:
    """Those of its addresses; both, where it has none and pods have a gateway beyond it."""
    return {family(address) for address in bridge.sources} or set(Family)


def _in(address: Address, networks: Collection[Network]) -> bool:
    return any(address in network for network in networks)
