# SPDX-License-Identifier: Apache-2.0
"""Datagram sockets of the node that were connected to a cluster IP before anyone served it.

Nobody is at a cluster IP, and what the node itself sends passes no hook that would translate it,
so such a socket is lost (kube-proxy.md 11.1: flows that were never translated). A pod's is not:
its packets are translated at its device. Left alone are sockets that we translated to what looks
like a frontend, and those that netfilter translates, as kube-proxy left them behind.
"""

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from pyroute2 import NFCTSocket
from pyroute2.netlink.exceptions import NetlinkError
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.records import Peer
from ebpflb.model.services import Protocol
from ebpflb.node.sock_diag import Connected, SockDiag
from ebpflb.plan.entries import Frontend
from ebpflb.stale_udp.find import Serving

_TRACKING = Path("/proc/sys/net/netfilter/nf_conntrack_count")


def untranslated(maps: Mapping[str, Map], diag: SockDiag) -> Iterator[Connected]:
    """The sockets of this namespace, which is the node's own, that are lost and need not be."""
    serving = Serving(maps)
    for one in list(diag.connected(Protocol.UDP)):
        address, port = one.there
        if maps["cluster_ips"].get(address) is None:
            continue
        found = serving.find(Frontend(address, port, Protocol.UDP))
        ours = maps["sockets"].get(Peer(one.cookie, address, port)) is not None
        if found and found[1] and not ours and not translated_elsewhere(one):
            yield one


def translated_elsewhere(one: Connected) -> bool:
    """Whether conntrack knows another destination for the socket's datagrams."""
    if not _TRACKING.exists():
        return False
    (source, sport), (destination, dport) = one.here, one.there
    kind = socket.AF_INET if destination.version == 4 else socket.AF_INET6
    asked = NFCTAttrTuple(kind, str(source), str(destination), int(Protocol.UDP), sport, dport)
    try:
        with NFCTSocket(nfgen_family=kind) as tracking:
            entries = tracking.entry("get", tuple_orig=asked)
    except (NetlinkError, OSError):  # not tracked
        return False
    replies = [entry.get_attr("CTA_TUPLE_REPLY") for entry in entries]  # None of the ACK
    found = [NFCTAttrTuple.from_netlink(kind, reply) for reply in replies if reply]
    return any((reply.saddr, reply.sport) != (str(destination), dport) for reply in found)
