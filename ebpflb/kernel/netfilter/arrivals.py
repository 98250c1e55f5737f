# SPDX-License-Identifier: Apache-2.0
"""Whether requests reach netfilter from a device's ingress with the choice of the program there.

Frames for the canary's frontends (plan/canary.py) are put into the device's ingress, as if they had
come from outside: BPF_PROG_TEST_RUN runs a program on a frame that redirects a clone of it. So
whatever is between our program and netfilter sees them: programs and filters of others, shapers, a
bridge. A table of our own counts the frames, and drops them before they would be translated: no
frame is routed or answered, and none leaves an entry in conntrack.
"""

import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple

from ebpflb.errors import NodeError
from ebpflb.kernel import bpf
from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter.nft import (
    GET_RULE,
    NEW_CHAIN,
    NEW_RULE,
    NEW_TABLE,
    Transaction,
    dump,
)
from ebpflb.kernel.netfilter.probe import internet_checksum
from ebpflb.kernel.netfilter.table import (
    CANARY,
    PREROUTING,
    base_chain,
    count,
    datagrams,
    drop,
    has_choice,
)
from ebpflb.kernel.netlink import (
    Tree,
    attributes,
    encode,
    from_text,
    list_items,
    to_number,
    to_text,
)
from ebpflb.kernel.programs.loader import SCHED_CLS, run_program
from ebpflb.model.addresses import Address, family
from ebpflb.model.devices import Addresses, Device
from ebpflb.plan.canary import CANARY_IPS, CANARY_PORT

_FIRST, _LAST = -450, -101  # priorities: before everything; before the kernel's NAT (-100)
_ATTEMPTS, _ATTEMPT_SECONDS, _POLL_SECONDS = 3, 0.5, 0.01
_FIRST_PORT = 49152  # of the frames' sources: each device has its own
_MOST = 64  # devices
_SENDER_MAC = bytes.fromhex("0200000000eb")
_UDP = 17
_EXPRESSIONS, _NAME, _DATA, _PACKETS, _CHAIN = 4, 1, 2, 2, 2  # NFTA_RULE_*, NFTA_EXPR_*, ...
_REDIRECT_CLONE = bytes.fromhex(
    "6112080000000000"  # r2 = skb->mark, a device's ifindex
    "b703000001000000"  # r3 = BPF_F_INGRESS
    "850000000d000000"  # call bpf_clone_redirect
    "9500000000000000"
)


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
    def match(self) -> tuple[Tree, ...]:
        return datagrams(CANARY_IPS[family(self.source)], self.source_port, CANARY_PORT)


def arrivals(uplinks: Mapping[Device, Addresses]) -> dict[str, Arrival]:
    """Return the result for each device: the worst of both families. Raises NodeError, KernelError.

    The canary's frontends have to be in the maps.
    """
    frames = list(_frames(uplinks))
    try:
        _count(frames)
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
    """Yield a frame of each family that the device has, from an address beside the device's."""
    for number, (device, addresses) in enumerate(list(uplinks.items())[:_MOST]):
        first = {family(each): each for each in reversed(addresses)}
        for each in first.values():
            beside = type(each)(int(each) ^ 1)
            yield _Frame(device, beside, _FIRST_PORT + number)


def _count(frames: Sequence[_Frame]) -> None:
    """Create the table, in place of one that a killed agent has left. Raises NodeError."""
    nft.delete(CANARY)
    name, change = to_text(CANARY.table), Transaction(CANARY)
    change.add(NEW_TABLE, encode({1: name, 2: to_number(0)}))
    for chain, priority in (("first", _FIRST), ("last", _LAST)):
        change.add(NEW_CHAIN, encode(base_chain(name, chain, "filter", PREROUTING, priority)))
    for frame in frames:
        for chain, rule in (
            ("first", (*frame.match, count())),
            ("last", (*frame.match, *has_choice(), count(), drop())),
            ("last", (*frame.match, count(), drop())),
        ):
            change.add(NEW_RULE, encode({1: name, 2: to_text(chain), 4: rule}))
    change.commit()


def _send_all(frames: Sequence[_Frame]) -> dict[_Frame, Arrival]:
    """Send frames until each has arrived as it should, or often enough. Raises KernelError."""
    loaded = bpf.prog_load(
        name="canary", program_type=SCHED_CLS, attach_type=0, code=_REDIRECT_CLONE, log=None
    )
    results = dict.fromkeys(frames, Arrival.LOST)
    with bpf.closing(loaded) as program:
        for _ in range(_ATTEMPTS):
            bad = [frame for frame, result in results.items() if result]
            sent = {frame: _send(program, frame) for frame in bad}
            results |= _results(frames, sent)
    return results


def _send(program: int, frame: _Frame) -> bool:
    return run_program(program, _bytes(frame), mark=frame.device.index).retval == 0


def _results(frames: Sequence[_Frame], sent: Mapping[_Frame, bool]) -> dict[_Frame, Arrival]:
    """Wait for the frames that were sent, and return what became of them."""
    until = time.monotonic() + _ATTEMPT_SECONDS
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
    """Yield of each frame: how many arrived; with and without a choice. Raises NodeError."""
    counts: dict[str, list[int]] = {"first": [], "last": []}
    for rule in map(attributes, dump(CANARY, GET_RULE, encode({1: to_text(CANARY.table)}))):
        if from_text(rule[1]) == CANARY.table:
            counts[from_text(rule[_CHAIN])].append(_counter(rule[_EXPRESSIONS]))
    last = iter(counts["last"])
    return zip(counts["first"], last, last, strict=True)


def _counter(expressions: bytes) -> int:
    """Return the packets that a rule has counted."""
    each = (attributes(item) for item in list_items(expressions))
    counter = next(it for it in each if from_text(it[_NAME]) == "counter")
    return int.from_bytes(attributes(counter[_DATA])[_PACKETS])


def _bytes(frame: _Frame) -> bytes:
    """Return the frame with its Ethernet header, which a device without one does not get."""
    to = CANARY_IPS[family(frame.source)]
    datagram = struct.pack(">HHHH", frame.source_port, CANARY_PORT, 9, 0) + b"?"
    ends = frame.source.packed + to.packed
    checksum = internet_checksum(ends + struct.pack(">HH", _UDP, len(datagram)) + datagram)
    datagram = datagram[:6] + struct.pack(">H", checksum or 0xFFFF) + datagram[8:]
    mac = bytes.fromhex(frame.device.mac.replace(":", "")) or bytes(6)
    return mac + _SENDER_MAC + _network(to, ends, len(datagram)) + datagram


def _network(to: Address, ends: bytes, length: int) -> bytes:
    """Return the EtherType and the IP header of a datagram."""
    if to.version == 6:
        return struct.pack(">HIHBB", 0x86DD, 6 << 28, length, _UDP, 64) + ends
    header = struct.pack(">BBHHHBBH", 0x45, 0, 20 + length, 0, 0, 64, _UDP, 0) + ends
    checksum = struct.pack(">H", internet_checksum(header))
    return struct.pack(">H", 0x0800) + header[:10] + checksum + header[12:]
