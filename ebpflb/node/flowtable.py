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

import struct
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from ebpflb.node import nft
from ebpflb.node.netlink_attributes import attribute, attributes, each, nested, number, text
from ebpflb.node.nft import Name
from ebpflb.node.nft_transaction import (
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
from ebpflb.plan.connections import DESTINATION_NAT, SEEN_REPLY

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
            names = each(attributes(found[3]).get(3, b""))
            return frozenset(name.rstrip(b"\0").decode() for name in names)
    return None


def _elements(table: Name, frontend_set: FrontendSet) -> Iterator[bytes]:
    for message in dump(table, GET_ELEMENTS, text(1, table.table), text(2, frontend_set.name)):
        for found in each(attributes(message).get(3, b"")):
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
