# SPDX-License-Identifier: Apache-2.0
"""Test packets: whether netfilter translates them, and whether they reach it from a device.

Whether this kernel translates by the netfilter engine's table: one packet is sent and received. The
test uses a temporary network namespace and a veth device. A rule writes the choice
into the packet's priority, as the program at ingress does. Needed kernel modules are loaded, if
they are installed.
"""

import socket
import struct
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from enum import StrEnum
from ipaddress import IPv4Address
from pathlib import Path
from typing import NamedTuple

import msgspec

from ebpflb import files
from ebpflb.entries.services import Chosen
from ebpflb.errors import NodeError, in_words
from ebpflb.kernel import bpf, netlink
from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter.elements import Elements
from ebpflb.kernel.netfilter.flowtable import flowtable_obstacle
from ebpflb.kernel.netfilter.table import (
    CANARY,
    INPUT,
    PREROUTING,
    NetfilterTable,
    TableOptions,
    base_chain,
    count,
    drop,
    has_choice,
    one_rule_table,
    set_priority,
    to_port,
)
from ebpflb.kernel.node.namespaces import call_in_new, capabilities
from ebpflb.kernel.programs.loader import SCHED_CLS, run_program
from ebpflb.kernel.segment import checksum, ip_header, pseudo_header
from ebpflb.model.addresses import Address, family
from ebpflb.model.devices import Addresses, Device
from ebpflb.plan.canary import CANARY_IPS, CANARY_PORT

_CHOICE_TABLE = nft.Name("inet", "ebpflb-choice")
_CHOICE_PRIORITY = -300  # before conntrack
_PORTS = ((40000, 40999), (42000, 42999))
_OPTIONS = TableOptions(0x4000, _PORTS, drops_invalid=True, sctp=True)
BACKEND_ID = 1
# RFC 5737: used in the namespace only
_CLIENT, _ENDPOINT, _SERVICE = map(IPv4Address, ("203.0.113.1", "203.0.113.2", "203.0.113.3"))
_CLIENT_PORT, _ENDPOINT_PORT, _SERVICE_PORT = 1111, 2222, 3333
_RECEIVER, _LINK_ADDRESS = "probe", bytes.fromhex("020000000002")
# rtnetlink's messages (linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h).
_NEW_LINK, _NEW_ADDRESS = 16, 20  # RTM_*
_LINK_HEADER = struct.Struct("=BxHiII")  # struct ifinfomsg: family, type, device, flags, change
_ADDRESS, _NAME, _LINK_INFO, _KIND = 1, 3, 18, 1  # IFLA_*, IFLA_INFO_KIND
_UP = 1  # IFF_UP
_ADDRESS_HEADER = struct.Struct("=BBBBI")  # struct ifaddrmsg: family, bits, flags, scope, device
_OWN_ADDRESS = 2  # IFA_LOCAL
_UDP, _SCTP = socket.IPPROTO_UDP, socket.IPPROTO_SCTP
_PACKETS = {
    _UDP: struct.pack(">HHHH", _CLIENT_PORT, _SERVICE_PORT, 9, 0) + b"?",
    # an INIT (RFC 9260, 3.3.2), whose checksum conntrack verifies
    _SCTP: bytes.fromhex("04570d05 00000000 dc038ea9 01000014 00000001 00010000 00010001 00000001"),
}
_ATTEMPTS, _ATTEMPT_SECONDS, _POLL_SECONDS = 3, 0.05, 0.01
_EXPRESSIONS, _CHAIN = 4, 2  # NFTA_RULE_*
_EXPRESSION, _CONTENT, _COUNTED = 1, 2, 2  # NFTA_EXPR_*, NFTA_COUNTER_PACKETS
_REDIRECT_CLONE = bytes.fromhex(
    "6112080000000000"  # r2 = skb->mark, a device's ifindex
    "b703000001000000"  # r3 = BPF_F_INGRESS
    "850000000d000000"  # call bpf_clone_redirect
    "9500000000000000"
)


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


# What `ebpflb run --init-only` found, for an agent that may make no network namespace.

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Answers(msgspec.Struct, frozen=True):
    """Obstacles are None if there is none. ``boot``: of the kernel that was asked."""

    boot: str
    netfilter: str | None
    flowtable: str | None
    sctp: bool


def leave_answers(path: Path) -> None:
    """Try everything, and write the answers. Raises NodeError or OSError."""
    missing = netfilter_obstacle()
    sctp = not missing and can_translate_sctp()
    answers = Answers(_BOOT_ID.read_text(), missing, flowtable_obstacle(), sctp)
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, msgspec.json.encode(answers))


def left_answers(path: Path) -> Answers | None:
    """Return the answers that were left since this boot; None if this process can try itself."""
    if "CAP_SYS_ADMIN" in capabilities():
        return None
    found = files.decode_regular(path, Answers)
    return found if found and found.boot == _BOOT_ID.read_text() else None


def _in_scratch_namespace(protocol: int) -> bool:
    """Run the test in a new namespace. Raises NodeError."""
    try:
        return call_in_new(lambda: _is_translated(protocol))
    except OSError as error:
        reason = in_words(error)
        raise NodeError(f"no probe can be made in a network namespace: {reason}") from error


def _is_translated(protocol: int) -> bool:
    _add_device()
    with closing(NetfilterTable(_OPTIONS)) as table:
        table.build()
        Elements(table.session, _OPTIONS).write([(BACKEND_ID, _ENDPOINT, _ENDPOINT_PORT)])
        _choose_and_count(protocol)
        return _reaches_endpoint(protocol)


def _add_device() -> None:
    """Add the receiver, a veth device whose peer is not used, with the endpoint's address."""
    header = _LINK_HEADER.pack(0, 0, 0, _UP, _UP)
    named = netlink.text(_NAME, _RECEIVER) + netlink.attribute(_ADDRESS, _LINK_ADDRESS)
    kind = netlink.nested(_LINK_INFO, netlink.text(_KIND, "veth"))
    with netlink.route_socket() as kernel:
        netlink.request(kernel, _NEW_LINK, header + named + kind, netlink.ACK | netlink.NEW)
        index = socket.if_nametoindex(_RECEIVER)
        address = _ADDRESS_HEADER.pack(socket.AF_INET, 24, 0, 0, index)
        address += netlink.attribute(_OWN_ADDRESS, _ENDPOINT.packed)
        netlink.request(kernel, _NEW_ADDRESS, address, netlink.ACK | netlink.NEW)


def _choose_and_count(protocol: int) -> None:
    """Write the choice into packets as they come, and count those that came to the endpoint."""
    rule = set_priority(Chosen.PREFIX | BACKEND_ID)
    made = one_rule_table(_CHOICE_TABLE, "choice", "filter", _CHOICE_PRIORITY, rule)
    name = netlink.to_text(_CHOICE_TABLE.table)
    made.add(nft.NEW_CHAIN, netlink.encode(base_chain(name, "arrived", "filter", INPUT, 0)))
    arrived = (*to_port(protocol, _ENDPOINT, _CLIENT_PORT, _ENDPOINT_PORT), count())
    made.add(nft.NEW_RULE, netlink.encode({1: name, 2: netlink.to_text("arrived"), 4: arrived}))
    made.commit()


def _reaches_endpoint(protocol: int) -> bool:
    frame, receiver = _frame(protocol, _PACKETS[protocol]), socket.if_nametoindex(_RECEIVER)
    with bpf.closing(_load_redirect()) as program:
        for _ in range(_ATTEMPTS):
            run_program(program, frame, mark=receiver)
            until = time.monotonic() + _ATTEMPT_SECONDS
            while time.monotonic() < until:
                if any(_counted(_CHOICE_TABLE)["arrived"]):
                    return True
                time.sleep(_POLL_SECONDS)
    return False


def _load_redirect() -> int:
    """Load the program that puts a clone of its frame into a device's ingress."""
    return bpf.prog_load(name="canary", program_type=SCHED_CLS, code=_REDIRECT_CLONE)


def _counted(table: nft.Name) -> dict[str, list[int]]:
    """Return the packets that each rule of a chain has counted. Raises NodeError."""
    counts: dict[str, list[int]] = defaultdict(list)
    rules = nft.dump(table, nft.GET_RULE, netlink.text(1, table.table))
    for rule in map(netlink.attributes, rules):
        if netlink.from_text(rule[1]) == table.table:
            each = map(netlink.attributes, netlink.list_items(rule[_EXPRESSIONS]))
            named = {netlink.from_text(it[_EXPRESSION]): it.get(_CONTENT, b"") for it in each}
            if counter := named.get("counter"):
                packets = netlink.attributes(counter)[_COUNTED]
                counts[netlink.from_text(rule[_CHAIN])].append(int.from_bytes(packets))
    return counts


def _frame(protocol: int, payload: bytes) -> bytes:
    return (
        _LINK_ADDRESS + _SENDER_MAC + ip_header(_CLIENT, _SERVICE, protocol, len(payload)) + payload
    )


# Whether requests reach netfilter from a device's ingress with the choice of the program there.
#
# Frames for the canary's frontends (plan/canary.py) are put into the device's ingress, as if they
# had come from outside: BPF_PROG_TEST_RUN runs a program on a frame that redirects a clone of it.
# So whatever is between our program and netfilter sees them: programs and filters of others,
# shapers, a bridge. A table of our own counts the frames, and drops them before they would be
# translated: no frame is routed or answered, and none leaves an entry in conntrack.

_FIRST, _LAST = -450, -101  # priorities: before everything; before the kernel's NAT (-100)
_ROUNDS, _ROUND_SECONDS = 3, 0.5
_FIRST_PORT = 49152  # of the frames' sources: each device has its own
_MOST = 64  # devices
_SENDER_MAC = bytes.fromhex("0200000000eb")


class Arrival(StrEnum):
    """What becomes of requests that come in at a device; in words if it is bad."""

    OK = ""
    CHOICE_LOST = "requests reach netfilter without the endpoint that ebpflb chose"
    LOST = "requests do not reach netfilter"
    DROPPED = "not known: a rule in netfilter drops the probe"
    NOT_SENT = "not known: the device takes no probe"

    @property
    def is_loss(self) -> bool:
        return self in (Arrival.CHOICE_LOST, Arrival.LOST)


class _Frame(NamedTuple):
    device: Device
    source: Address
    source_port: int

    @property
    def match(self) -> tuple[netlink.Tree, ...]:
        return to_port(_UDP, CANARY_IPS[family(self.source)], self.source_port, CANARY_PORT)


def arrivals(uplinks: Mapping[Device, Addresses]) -> dict[str, Arrival]:
    """Return the result for each device: the worst of both families. Raises NodeError, KernelError.

    The canary's frontends have to be in the maps.
    """
    frames = list(_frames(uplinks))
    try:
        _count_frames(frames)
        results = _send_all(frames)
    finally:
        with suppress(NodeError):
            nft.delete(CANARY)
    worst: dict[str, Arrival] = {}
    for frame, result in results.items():
        former = worst.get(frame.device.name, Arrival.OK)
        worst[frame.device.name] = max(former, result, key=_BADNESS.index)
    return worst


_MAY_CHANGE = {Arrival.LOST, Arrival.DROPPED}  # a frame may be in a shaper's queue
_BADNESS = (Arrival.OK, Arrival.NOT_SENT, Arrival.DROPPED, Arrival.LOST, Arrival.CHOICE_LOST)


def _frames(uplinks: Mapping[Device, Addresses]) -> Iterator[_Frame]:
    """Yield a frame of each family that the device has, from an address next to the device's."""
    for number, (device, addresses) in enumerate(list(uplinks.items())[:_MOST]):
        first = {family(each): each for each in reversed(addresses)}
        for each in first.values():
            beside = type(each)(int(each) ^ 1)
            yield _Frame(device, beside, _FIRST_PORT + number)


def _count_frames(frames: Sequence[_Frame]) -> None:
    """Create the table, in place of one that a killed agent has left. Raises NodeError."""
    nft.delete(CANARY)
    name, change = netlink.to_text(CANARY.table), nft.Transaction(CANARY)
    change.add(nft.NEW_TABLE, netlink.encode({1: name, 2: netlink.to_number(0)}))
    for chain, priority in (("first", _FIRST), ("last", _LAST)):
        tree = base_chain(name, chain, "filter", PREROUTING, priority)
        change.add(nft.NEW_CHAIN, netlink.encode(tree))
    for frame in frames:
        for chain, rule in (
            ("first", (*frame.match, count())),
            ("last", (*frame.match, *has_choice(), count(), drop())),
            ("last", (*frame.match, count(), drop())),
        ):
            change.add(nft.NEW_RULE, netlink.encode({1: name, 2: netlink.to_text(chain), 4: rule}))
    change.commit()


def _send_all(frames: Sequence[_Frame]) -> dict[_Frame, Arrival]:
    """Send frames until each has arrived as it should, or often enough. Raises KernelError."""
    results = dict.fromkeys(frames, Arrival.LOST)
    with bpf.closing(_load_redirect()) as program:
        for _ in range(_ROUNDS):
            bad = [frame for frame, result in results.items() if result]
            sent = {frame: _send(program, frame) for frame in bad}
            results |= _results(frames, sent)
    return results


def _send(program: int, frame: _Frame) -> bool:
    return run_program(program, _bytes(frame), mark=frame.device.index).retval == 0


def _results(frames: Sequence[_Frame], sent: Mapping[_Frame, bool]) -> dict[_Frame, Arrival]:
    """Wait for the frames that were sent, and return what became of them."""
    until = time.monotonic() + _ROUND_SECONDS
    while True:
        found = {frame: _result(*counts) for frame, counts in zip(frames, _counts(), strict=True)}
        results = {it: found[it] if is_sent else Arrival.NOT_SENT for it, is_sent in sent.items()}
        if _MAY_CHANGE.isdisjoint(results.values()) or time.monotonic() > until:
            return results
        time.sleep(_POLL_SECONDS)


def _result(first: int, chosen: int, untranslated: int) -> Arrival:
    if chosen:
        return Arrival.OK
    if untranslated:
        return Arrival.CHOICE_LOST
    return Arrival.DROPPED if first else Arrival.LOST


def _counts() -> Iterator[tuple[int, int, int]]:
    """Yield for each frame how many arrived, with a choice, and without. Raises NodeError."""
    counts = _counted(CANARY)
    last = iter(counts["last"])
    return zip(counts["first"], last, last, strict=True)


def _bytes(frame: _Frame) -> bytes:
    """Return the frame with its Ethernet header, cut off for a device that has none."""
    to = CANARY_IPS[family(frame.source)]
    datagram = struct.pack(">HHHH", frame.source_port, CANARY_PORT, 9, 0) + b"?"
    total = checksum(pseudo_header(frame.source, to, _UDP, len(datagram)) + datagram)
    datagram = datagram[:6] + struct.pack(">H", total or 0xFFFF) + datagram[8:]
    mac = bytes.fromhex(frame.device.mac.replace(":", "")) or bytes(6)
    return mac + _SENDER_MAC + ip_header(frame.source, to, _UDP, len(datagram)) + datagram
