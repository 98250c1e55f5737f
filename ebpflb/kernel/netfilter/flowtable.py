# SPDX-License-Identifier: Apache-2.0
"""The kernel's flowtable, in an nft table of its own (--fast-forward with netfilter).

A connection whose endpoint has answered goes on past the stack, if it was asked for at one of the
``frontends``: at its next packet in FORWARD, behind all rules that could drop it, it enters the
flowtable, and from then on the hook of a device sends its packets straight to the next device.
conntrack has no sign of who has translated a connection. So there is a set of frontends for each
family, which the original destination is looked up in: what others translate stays in the stack.

The kernel itself takes TCP only when it is established and gives it back at FIN and RST, and gives
back what is too long for the next device or at the end of its TTL. Only TCP and UDP are taken.
"""

import logging
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ebpflb.errors import NodeError, in_words
from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter.nft import Name
from ebpflb.kernel.netfilter.transaction import (
    DELETE_ELEMENTS,
    DELETE_FLOWTABLE,
    GET_ELEMENTS,
    GET_FLOWTABLE,
    GET_RULE,
    NEW_CHAIN,
    NEW_ELEMENTS,
    NEW_FLOWTABLE,
    NEW_RULE,
    NEW_SET,
    NEW_TABLE,
    Refused,
    Transaction,
    dump,
)
from ebpflb.kernel.netlink import attribute, attributes, list_items, nested, number, text
from ebpflb.kernel.node.scratch_namespace import leave
from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Frontend
from ebpflb.plan.flow_entries import DESTINATION_NAT, SEEN_REPLY
from ebpflb.plan.planner import Plan

TABLE = Name("inet", "ebpflb-fast-forward")
FLOWTABLE = CHAIN = "fast-forward"
_PRIORITY = 300  # behind the filters (0) and the tables of SELinux (50 to 225)
_FORWARD, _INGRESS = 2, 0  # NF_INET_FORWARD, NF_NETDEV_INGRESS
_AT_ONCE = 1000  # elements in one message, whose attribute has at most 64 KiB
_DEVICES_AT_ONCE = 128  # of the kernel's 256 in a message (NFT_NETDEVICE_MAX)

_REGISTER = 8  # NFT_REG32_00, the first of 16 that have 4 bytes each
_CT_STATUS, _CT_PROTOCOL, _CT_PORT, _CT_V4, _CT_V6 = 2, 10, 12, 20, 22  # NFT_CT_*
_ORIGINAL = attribute(3, b"\0")  # NFTA_CT_DIRECTION: IP_CT_DIR_ORIGINAL
_ANSWERED = struct.pack("=I", SEEN_REPLY | DESTINATION_NAT)
_COMMENT = 0  # NFTNL_UDATA_RULE_COMMENT


class FrontendSet(NamedTuple):
    """One family's set of frontends. ``data_type`` is for nft(8): address . protocol . service."""

    name: str
    address_key: int  # NFT_CT_*
    address_size: int
    data_type: int

    @property
    def key_size(self) -> int:
        return self.address_size + 8


FRONTEND_SETS = (
    FrontendSet("frontends-v4", _CT_V4, 4, 7 << 12 | 12 << 6 | 13),
    FrontendSet("frontends-v6", _CT_V6, 16, 8 << 12 | 12 << 6 | 13),
)


class Contents(NamedTuple):
    """``frontends`` are elements of the sets (``element``)."""

    devices: frozenset[str]
    frontends: frozenset[bytes]


EMPTY_FLOWTABLE = Contents(frozenset(), frozenset())


def element(address: bytes, protocol: int, port: int) -> bytes:
    """A frontend as the sets have it; ``address`` is packed, in 4 or 16 bytes."""
    return address + struct.pack(">B3xH2x", protocol, port)


def read(table: Name) -> Contents | None:
    """What is there; None where chain, rules or flowtable are not as ``make`` makes them.

    Raises Refused.
    """
    rules = dump(table, GET_RULE, text(1, table.table), text(2, CHAIN))
    comments = [attributes(rule).get(7, b"") for rule in rules]
    devices = _devices(table)
    if comments != [_comment(frontend_set) for frontend_set in FRONTEND_SETS] or devices is None:
        return None
    elements = (item for frontend_set in FRONTEND_SETS for item in _elements(table, frontend_set))
    return Contents(devices, frozenset(elements))


def _devices(table: Name) -> frozenset[str] | None:
    for found in map(attributes, dump(table, GET_FLOWTABLE)):
        if (found[1], found[2]) == (table.table.encode() + b"\0", FLOWTABLE.encode() + b"\0"):
            names = list_items(attributes(found[3]).get(3, b""))
            return frozenset(name.rstrip(b"\0").decode() for name in names)
    return None


def _elements(table: Name, frontend_set: FrontendSet) -> Iterator[bytes]:
    for message in dump(table, GET_ELEMENTS, text(1, table.table), text(2, frontend_set.name)):
        for found in list_items(attributes(message).get(3, b"")):
            yield attributes(attributes(found)[1])[1]


def make(table: Name) -> None:
    """Makes it anew, without devices and frontends, in a table that may be missing. Raises
    Refused.
    """
    remove(table)
    made = Transaction(table)
    made.add(NEW_TABLE, text(1, table.table))
    made.add(NEW_FLOWTABLE, *_flowtable(table, ()))
    for place, frontend_set in enumerate(FRONTEND_SETS, start=1):
        key = number(4, frontend_set.data_type), number(5, frontend_set.key_size), number(10, place)
        made.add(NEW_SET, text(1, table.table), text(2, frontend_set.name), number(3, 0), *key)
    hook = nested(4, number(1, _FORWARD), number(2, _PRIORITY))
    made.add(NEW_CHAIN, text(1, table.table), text(3, CHAIN), hook, text(7, "filter"))
    for frontend_set in FRONTEND_SETS:
        comment = attribute(7, _comment(frontend_set))
        rule = nested(4, *(nested(1, item) for item in _rule(frontend_set)))
        made.add(NEW_RULE, text(1, table.table), text(2, CHAIN), rule, comment)
    made.commit()


def _rule(frontend_set: FrontendSet) -> Iterable[bytes]:
    """Who was answered, is translated, and asked for one of the frontends, enters the flowtable."""
    register = _REGISTER + frontend_set.address_size // 4
    yield _expression("ct", number(1, _REGISTER), number(2, _CT_STATUS))
    mask, zero = nested(4, attribute(1, _ANSWERED)), nested(5, attribute(1, bytes(4)))
    yield _expression(
        "bitwise", number(1, _REGISTER), number(2, _REGISTER), number(3, 4), mask, zero
    )
    yield _expression("cmp", number(1, _REGISTER), number(2, 0), nested(3, attribute(1, _ANSWERED)))
    yield _expression("ct", number(1, _REGISTER), number(2, frontend_set.address_key), _ORIGINAL)
    yield _expression("ct", number(1, register), number(2, _CT_PROTOCOL), _ORIGINAL)
    yield _expression("ct", number(1, register + 1), number(2, _CT_PORT), _ORIGINAL)
    yield _expression("lookup", text(1, frontend_set.name), number(2, _REGISTER))
    yield _expression("flow_offload", text(1, FLOWTABLE))


def _expression(name: str, *contents: bytes) -> bytes:
    return text(1, name) + nested(2, *contents)


def _comment(frontend_set: FrontendSet) -> bytes:
    """By which the rules are known again; nft(8) shows it."""
    said = f"ebpflb: answered connections to {frontend_set.name}".encode() + b"\0"
    return bytes([_COMMENT, len(said)]) + said


def _flowtable(table: Name, devices: Iterable[str]) -> tuple[bytes, ...]:
    names = nested(3, *(text(1, name) for name in devices))
    hook = nested(3, number(1, _INGRESS), number(2, 0), names)
    return text(1, table.table), text(2, FLOWTABLE), hook


def add_devices(table: Name, names: Collection[str]) -> dict[str, str]:
    """Of those that the kernel refuses: device -> why."""
    names = sorted(names)
    refused: dict[str, str] = {}
    for at in range(0, len(names), _DEVICES_AT_ONCE):
        some = names[at : at + _DEVICES_AT_ONCE]
        if _change_devices(table, NEW_FLOWTABLE, some):
            answers = {name: _change_devices(table, NEW_FLOWTABLE, [name]) for name in some}
            refused |= {name: str(error) for name, error in answers.items() if error}
    return refused


def remove_devices(table: Name, names: Iterable[str]) -> None:
    """One that has gone meanwhile, the kernel has removed."""
    for name in names:
        _change_devices(table, DELETE_FLOWTABLE, [name])


def _change_devices(table: Name, kind: int, names: Iterable[str]) -> Refused | None:
    change = Transaction(table)
    change.add(kind, *_flowtable(table, names))
    try:
        change.commit()
    except Refused as error:
        return error
    return None


def change_frontends(table: Name, new: Iterable[bytes], gone: Iterable[bytes]) -> None:
    """All at once. Raises Refused."""
    change = Transaction(table)
    for kind, elements in ((DELETE_ELEMENTS, sorted(gone)), (NEW_ELEMENTS, sorted(new))):
        for frontend_set in FRONTEND_SETS:
            own = [item for item in elements if len(item) == frontend_set.key_size]
            for at in range(0, len(own), _AT_ONCE):
                change.add(kind, *_listed(table, frontend_set, own[at : at + _AT_ONCE]))
    if change:
        change.commit()


def _listed(table: Name, frontend_set: FrontendSet, elements: Iterable[bytes]) -> tuple[bytes, ...]:
    keys = (nested(1, nested(1, attribute(1, item))) for item in elements)
    return text(1, table.table), text(2, frontend_set.name), nested(3, *keys)


def remove(table: Name) -> None:
    """Its flows go on through the stack. Raises NodeError."""
    nft.delete(table)


# Whether this kernel has flowtables (nf_flow_table, nft_flow_offload): one is made.
#
# In a network namespace of its own, which ends with the probe: no packet goes through it. Parts
# that are modules are loaded by that, if they are there.


def flowtable_obstacle() -> str | None:
    """Why there cannot be any; None: there can."""
    with ThreadPoolExecutor(1, "probe") as thread:
        try:
            refused = thread.submit(_try).result()
        except (NodeError, OSError) as error:
            return f"the kernel can make no flowtable ({in_words(error)})"
    return next(iter(refused.values()), None)


def _try() -> dict[str, str]:
    """The same one as the engine's, at the new namespace's loopback."""
    leave()
    make(TABLE)
    return add_devices(TABLE, ["lo"])


# What the kernel's flowtable (flowtable.py) is to hold, and that it holds it.
#
# The agent's loop says what is to be in it; the thread that watches the engine's table (nat_watch)
# writes it there, so that the loop never waits for nf_tables.

log = logging.getLogger(__name__)

_PROTOCOLS = (Protocol.TCP, Protocol.UDP)  # those that the kernel takes


class InFlowtable(NamedTuple):
    """What a flowtable is to hold."""

    devices: Mapping[str, int]  # name -> ifindex
    frontends: frozenset[bytes]  # elements of the sets


class FlowtableSync:
    """``left_out``: device -> why the kernel does not take it, of those that are to be in it.

    ``on_change`` is called, in the loop's thread, when there is anything to write. Nothing is
    written before devices and frontends are known.
    """

    def __init__(self, *, chosen: bool, missing: str | None = None) -> None:
        """``missing``: why this kernel has no flowtable, as far as one was chosen."""
        self.enabled, self.missing = chosen and not missing, missing
        self.on_change: Callable[[], None] = lambda: None
        self.left_out: Mapping[str, str] = {}
        self._lock = threading.Lock()
        self._devices: Mapping[str, int] | None = None
        self._addresses: frozenset[Address] = frozenset()
        self._frontends: frozenset[Frontend] | None = None
        self._changed = False
        self._made: InFlowtable | None = None  # what was written last; None: to be looked at

    def place(self, devices: Iterable[Device], addresses: Iterable[Address]) -> None:
        """The devices that are served, and the addresses at which NodePorts are."""
        found = {device.name: device.index for device in devices}, frozenset(addresses)
        if self.enabled and (found != (self._devices, self._addresses) or not self._made):
            with self._lock:
                self._devices, self._addresses = found
                self._changed = True
            self.on_change()

    def start_over(self, frontends: Iterable[Frontend]) -> None:
        """All frontends are these."""
        if self.enabled:
            with self._lock:
                self._frontends = frozenset(frontends)
                self._changed = True
            self.on_change()

    def written(self, plan: Plan) -> None:
        """The frontends are now as this plan has them."""
        if not self.enabled or self._frontends is None:
            return
        new = {frontend for frontend, _ in plan.services} - self._frontends
        gone = self._frontends.intersection(plan.removed_services)
        if new or gone:
            with self._lock:
                self._frontends = (self._frontends | new) - gone
                self._changed = True
            self.on_change()

    def look(self, *, needed: bool, report_only: bool) -> list[str]:
        """Compares the whole with what was written last; what differs from it, in words.

        It is put back, unless ``report_only``. Raises NodeError.
        """
        if not (needed and self.enabled):
            self._remove()
            return []
        if not self._is_known:
            return []
        found, made = read(TABLE), self._made
        differs = differences(found, made) if made else []
        if not (differs and report_only):
            self._write(found)
        return differs

    def catch_up(self, *, needed: bool) -> None:
        """Writes what has changed since the last time, without a look. Raises NodeError."""
        if not (needed and self.enabled and self._changed and self._is_known):
            return
        made = self._made
        known = made and Contents(frozenset(made.devices), made.frontends)
        self._write(known or read(TABLE))

    @property
    def said(self) -> str | None:
        """For the operator; None where it was not chosen."""
        if not self.enabled:
            return self.missing and f"none: {self.missing}"
        out = "; ".join(f"{name} is left out: {why}" for name, why in sorted(self.left_out.items()))
        count = len(self._made.devices) if self._made else 0
        return f"in force at {count} devices" + (f"; {out}" if out else "")

    @property
    def _is_known(self) -> bool:
        return self._devices is not None and self._frontends is not None

    def _write(self, found: Contents | None) -> None:
        former, self._made = self._made, None  # until all is written
        wanted = self._wanted()
        if found is None:
            make(TABLE)
            found = EMPTY_FLOWTABLE
        known = former.devices if former else {}
        has = {name for name in found.devices if known.get(name) == wanted.devices.get(name)}
        remove_devices(TABLE, found.devices - wanted.devices.keys())
        refused = add_devices(TABLE, wanted.devices.keys() - has)
        new, gone = wanted.frontends - found.frontends, found.frontends - wanted.frontends
        change_frontends(TABLE, new, gone)
        self._tell(_still_there(refused))
        taken = {name: index for name, index in wanted.devices.items() if name not in refused}
        self._made = wanted._replace(devices=taken)

    def _wanted(self) -> InFlowtable:
        with self._lock:
            self._changed = False
            devices, addresses = self._devices or {}, self._addresses
            frontends = self._frontends or ()
        return InFlowtable(devices, elements(frontends, addresses))

    def _tell(self, left_out: Mapping[str, str]) -> None:
        for name, why in sorted(left_out.items()):
            if self.left_out.get(name) != why:
                log.warning("device %s cannot be in the flowtable: %s", name, why)
        self.left_out = left_out

    def _remove(self) -> None:
        self._made, self.left_out = None, {}
        remove(TABLE)


def _still_there(refused: Mapping[str, str]) -> dict[str, str]:
    """Without those that have gone meanwhile: the next list of devices will be without them."""
    names = {name for _, name in socket.if_nameindex()}
    return {name: why for name, why in refused.items() if name in names}


def elements(frontends: Iterable[Frontend], addresses: Iterable[Address]) -> frozenset[bytes]:
    """As the sets have them: a NodePort is a frontend at each of these addresses of its family."""
    addresses = tuple(addresses)
    found = set()
    for address, port, protocol in (each for each in frontends if each.protocol in _PROTOCOLS):
        of_node = (it for it in addresses if it.version == address.version)
        for each in of_node if address.is_unspecified else (address,):
            found.add(element(each.packed, protocol, port))
    return frozenset(found)


def differences(found: Contents | None, made: InFlowtable) -> list[str]:
    """What is not as it was made, in words; the kernel itself removes a device that goes."""
    if found is None:
        return ["the flowtable or its rules had been removed or changed by another program"]
    there = {name: index for index, name in socket.if_nameindex()}
    missing = sorted(made.devices.keys() - found.devices)
    lost = [name for name in missing if there.get(name) == made.devices[name]]
    said = [f"the flowtable's device {name} was missing" for name in lost]
    counts = len(made.frontends - found.frontends), len(found.frontends - made.frontends)
    names = ("frontends were missing in the flowtable's sets", "in them were not planned")
    return said + [f"{count} {name}" for count, name in zip(counts, names, strict=True) if count]
