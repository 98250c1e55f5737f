# SPDX-License-Identifier: Apache-2.0
"""Whether this kernel translates by the netfilter engine's table: one packet is sent and received.

The test uses a temporary network namespace and a pair of veth devices. A rule writes the choice
into the packet's priority, as the program at ingress does. Needed kernel modules are loaded, if
they are installed.
"""

import socket
import struct
from contextlib import closing
from ipaddress import IPv4Address

from ebpflb.entries.services import Chosen
from ebpflb.errors import NodeError, in_words
from ebpflb.kernel import netlink
from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter.elements import Elements
from ebpflb.kernel.netfilter.table import NetfilterTable, TableOptions, one_rule_table, set_priority
from ebpflb.kernel.node.namespaces import call_in_new

# The checksum of IP, TCP, UDP and ICMP (RFC 1071), for packets that are made here.


def internet_checksum(data: bytes) -> int:
    """Return the checksum; an odd last byte counts as if a zero followed."""
    total: int = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


_CHOICE_TABLE = nft.Name("inet", "ebpflb-choice")
_CHOICE_PRIORITY = -300  # before conntrack
_PORTS = ((40000, 40999), (42000, 42999))
_OPTIONS = TableOptions(0x4000, _PORTS, drops_invalid=True, sctp=True)
BACKEND_ID = 1
# RFC 5737: used in the namespace only
_CLIENT, _ENDPOINT, _SERVICE = map(IPv4Address, ("203.0.113.1", "203.0.113.2", "203.0.113.3"))
_CLIENT_PORT, _ENDPOINT_PORT, _SERVICE_PORT = 1111, 2222, 3333
_SENDER, _RECEIVER = "probe0", "probe1"
_LINK_ADDRESSES = {_SENDER: b"\2\0\0\0\0\1", _RECEIVER: b"\2\0\0\0\0\2"}
_IPV4 = 0x0800  # ETH_P_IP
# rtnetlink's messages (linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h).
_NEW_LINK, _NEW_ADDRESS = 16, 20  # RTM_*
_LINK_HEADER = struct.Struct("=BxHiII")  # struct ifinfomsg: family, type, device, flags, change
_LINK_ADDRESS, _NAME, _LINK_INFO = 1, 3, 18  # IFLA_*
_KIND, _DATA, _PEER = 1, 2, 1  # IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER
_UP = 1  # IFF_UP
_ADDRESS_HEADER = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, bits, flags, scope, device
_OWN_ADDRESS = 2  # IFA_LOCAL
_UDP, _SCTP = socket.IPPROTO_UDP, socket.IPPROTO_SCTP
_UDP_PACKET = struct.pack(">HHHH", _CLIENT_PORT, _SERVICE_PORT, 9, 0) + b"?"
_ATTEMPTS, _ATTEMPT_SECONDS = 3, 0.05


def netfilter_obstacle() -> str | None:
    """Return why the netfilter engine cannot translate here; None if it can."""
    try:
        is_translated = _in_scratch_namespace(_UDP)
    except NodeError as error:
        return f"the kernel cannot translate by nf_tables ({error})"
    if is_translated:
        return None
    return (
        "the kernel does not translate by nf_tables: a probe packet was not delivered to its"
        " endpoint; check that the modules nft_chain_nat, nft_nat and nf_conntrack are usable"
    )


def can_translate_sctp() -> bool:
    """Whether the kernel translates the ports of SCTP packets. Raises NodeError."""
    return _in_scratch_namespace(_SCTP)


def _in_scratch_namespace(protocol: int) -> bool:
    """Run the test in a new namespace. Raises NodeError."""
    try:
        return call_in_new(lambda: _is_translated(protocol))
    except OSError as error:
        reason = in_words(error)
        raise NodeError(f"no probe can be made in a network namespace: {reason}") from error


def _is_translated(protocol: int) -> bool:
    _add_devices()
    with closing(NetfilterTable(_OPTIONS)) as table:
        table.build()
        Elements(table.session, _OPTIONS).write([(BACKEND_ID, _ENDPOINT, _ENDPOINT_PORT)])
        _write_choice()
        return _reaches_endpoint(protocol)


def _add_devices() -> None:
    """Add the devices, the receiver first: the sender's queue works at once if it has a carrier."""
    peer = netlink.attribute(_PEER, _LINK_HEADER.pack(0, 0, 0, 0, 0) + _device(_RECEIVER))
    info = netlink.text(_KIND, "veth") + netlink.nested(_DATA, peer)
    pair = _LINK_HEADER.pack(0, 0, 0, 0, 0) + _device(_SENDER) + netlink.nested(_LINK_INFO, info)
    with netlink.route_socket() as kernel:
        netlink.request(kernel, _NEW_LINK, pair, netlink.ACK | netlink.NEW)
        receiver, sender = map(socket.if_nametoindex, (_RECEIVER, _SENDER))
        address = _ADDRESS_HEADER.pack(socket.AF_INET, 24, 0, 0, receiver)
        address += netlink.attribute(_OWN_ADDRESS, _ENDPOINT.packed)
        netlink.request(kernel, _NEW_ADDRESS, address, netlink.ACK | netlink.NEW)
        for index in (receiver, sender):
            up = _LINK_HEADER.pack(0, 0, index, _UP, _UP)
            netlink.request(kernel, _NEW_LINK, up, netlink.ACK)


def _device(name: str) -> bytes:
    return netlink.text(_NAME, name) + netlink.attribute(_LINK_ADDRESS, _LINK_ADDRESSES[name])


def _write_choice() -> None:
    rule = set_priority(Chosen.PREFIX | BACKEND_ID)
    one_rule_table(_CHOICE_TABLE, "choice", "filter", _CHOICE_PRIORITY, rule).commit()


def _reaches_endpoint(protocol: int) -> bool:
    kind = socket.SOCK_DGRAM if protocol == _UDP else socket.SOCK_RAW
    packet = _UDP_PACKET if protocol == _UDP else sctp_init(_CLIENT_PORT, _SERVICE_PORT)
    with (
        socket.socket(socket.AF_INET, kind, protocol) as endpoint,
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sender,
    ):
        endpoint.bind((str(_ENDPOINT), _ENDPOINT_PORT))
        endpoint.settimeout(_ATTEMPT_SECONDS)
        sender.bind((_SENDER, 0))
        for _ in range(_ATTEMPTS):
            sender.send(_frame(protocol, packet))
            try:
                received = endpoint.recv(1024)
            except TimeoutError:
                continue
            return protocol == _UDP or _destination_port(received) == _ENDPOINT_PORT
    return False


def _destination_port(packet: bytes) -> int:
    """Return the port; ``packet`` begins with its IPv4 header, which has no options."""
    return int.from_bytes(packet[22:24], "big")


def _frame(protocol: int, payload: bytes) -> bytes:
    ethernet = _LINK_ADDRESSES[_RECEIVER] + _LINK_ADDRESSES[_SENDER]
    fields = [0x45, 0, 20 + len(payload), 0, 0, 64, protocol, 0, _CLIENT.packed, _SERVICE.packed]
    ip_header = struct.Struct(">BBHHHBBH4s4s")
    fields[7] = internet_checksum(ip_header.pack(*fields))
    return ethernet + struct.pack(">H", _IPV4) + ip_header.pack(*fields) + payload


def sctp_init(source: int, destination: int) -> bytes:
    """Return an SCTP packet that opens an association (RFC 9260, 3.3.2) between two ports."""
    ports_and_tag = struct.pack(">HHI", source, destination, 0)
    chunk = struct.pack(">BBHIIHHI", 1, 0, 20, 1, 65536, 1, 1, 1)
    checksum = _crc32c(ports_and_tag + bytes(4) + chunk)
    return ports_and_tag + struct.pack("<I", checksum) + chunk


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF
