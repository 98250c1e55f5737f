# SPDX-License-Identifier: Apache-2.0
"""The canary: service ports for checks by `ebpflb doctor` and by the agent itself.

The canary is part of the desired state like any Service, under a namespace name that the API
rejects. Its service ports count as the youngest, so a Service that claims the same frontend wins.
Its addresses are constants that no host has. Doctor gives the client's and the endpoint's to
network namespaces of its own, and asks for a NodePort too; the frames that the agent sends
(kernel/netfilter/probe.py) end before they would reach an endpoint.
"""

from ipaddress import ip_address, ip_network

import msgspec

from ebpflb.entries.services import BackendName, Frontend
from ebpflb.model.addresses import Address, Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.desired import ANY, DesiredBackend, DesiredService

NAMESPACE, NAME = "ebpflb_doctor", "canary"  # the API allows no "_" in a name
CANARY_PROTOCOLS = (Protocol.TCP, Protocol.UDP)
CANARY_PORT, ENDPOINT_PORT = 9, 8080


def _both(v4: str, v6: str) -> dict[Family, Address]:
    return {Family.IPV4: ip_address(v4), Family.IPV6: ip_address(v6)}


CANARY_IPS = _both("192.0.0.8", "100::eb")  # RFC 7600: the dummy address; RFC 6666: discard-only
CLIENTS = _both("192.0.0.248", "100::eb:1")  # RFC 6890: reserved, unassigned
ENDPOINTS = _both("192.0.0.249", "100::eb:2")
_ANYWHERE = {Family.IPV4: ip_network("0.0.0.0/0"), Family.IPV6: ip_network("::/0")}

_YOUNGEST = "~"  # sorts after every creationTimestamp
_EXTERNAL = frozenset({"endpoints", "external", "restricted"})
_NODEPORT = _EXTERNAL | {"nodeport"}
_BACKEND = frozenset({"cluster", "here"})


class CanaryLease(msgspec.Struct):
    """The agent's answer: the canary is in the maps for some seconds from now on.

    ``id`` changes whenever the canary was withdrawn meanwhile. ``devices`` is --devices, "" for
    all.
    """

    id: str
    devices: str = ""


def is_canary(name: PortName) -> bool:
    return name.namespace == NAMESPACE


def service_ports(nodeport: int) -> dict[PortName, DesiredService]:
    """Return the desired state of the canary's service ports; a ``nodeport`` of 0 means none."""
    ports = (_port(of, protocol, nodeport) for of in CANARY_IPS for protocol in CANARY_PROTOCOLS)
    return {desired.name: desired for desired in ports}


def _port(of: Family, protocol: Protocol, nodeport: int) -> DesiredService:
    """Return a service port.

    The cluster IP admits every client. It is restricted so that sockets in other network
    namespaces, whose address is unknown, leave it to the packet path (select_admission). The
    NodePort, which another program may use, admits doctor's client only.
    """
    frontends = {Frontend(CANARY_IPS[of], CANARY_PORT, protocol): _EXTERNAL}
    if nodeport:
        frontends[Frontend(ANY[of], nodeport, protocol)] = _NODEPORT
    endpoint = BackendName("", NAMESPACE)
    return DesiredService(
        name=PortName(NAMESPACE, NAME, protocol.name.lower(), protocol, of),
        created=_YOUNGEST,
        frontends=frontends,
        affinity_seconds=0,
        backends=(DesiredBackend(ENDPOINTS[of], ENDPOINT_PORT, _BACKEND, endpoint),),
        source_ranges=(_ANYWHERE[of],),
        nodeport_source_ranges=(ip_network(CLIENTS[of]),) if nodeport else (),
    )
