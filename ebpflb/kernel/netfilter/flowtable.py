# SPDX-License-Identifier: Apache-2.0
"""The kernel's flowtable, in an nft table of its own (--fast-forward with netfilter).

A connection to one of the ``frontends`` bypasses the stack after its endpoint has answered: at its
16th packet, both directions counted, or the next one in FORWARD, behind all rules that could drop
it, it enters the flowtable. From then on the hook of a device sends its packets directly to the
next device. conntrack does not show who translated a connection. So each family has a set of
frontends, and the original destination must be in it: connections that other programs translate
stay in the stack.

The rules ask conntrack how many packets have passed. So the kernel turns on conntrack's accounting
in this network namespace (net.netfilter.nf_conntrack_acct), where it stays on. Connections that
were opened before have no count, and stay in the stack.

The kernel takes TCP only when it is established and returns it to the stack at FIN and RST. It also
returns packets that are too long for the next device, or whose TTL ends. Only TCP and UDP are
taken.
"""

import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpflb.entries.flows import DESTINATION_NAT, SEEN_REPLY
from ebpflb.entries.services import Frontend
from ebpflb.errors import NodeError, in_words
from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter import table as rules
from ebpflb.kernel.netfilter.nft import Name, Transaction
from ebpflb.kernel.netfilter.table import load_ct
from ebpflb.kernel.netlink import (
    attributes,
    encode,
    has_attributes,
    list_items,
    nested,
    text,
    to_number,
    to_text,
)
from ebpflb.kernel.node.namespaces import call_in_new
from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device
from ebpflb.model.services import Protocol
from ebpflb.plan.planner import Plan

TABLE = Name("inet", "ebpflb-fast-forward")
FLOWTABLE = CHAIN = "fast-forward"
_LONG = "long"  # of connections
_PRIORITY = 300  # behind the filters (0) and the tables of SELinux (50 to 225)
_FORWARD, _INGRESS = 2, 0  # NF_INET_FORWARD, NF_NETDEV_INGRESS
_AT_ONCE = 1000  # elements in one message, whose attribute has at most 64 KiB
_DEVICES_AT_ONCE = 128  # of the kernel's maximum of 256 in a message (NFT_NETDEVICE_MAX)

_CT_STATUS, _CT_PROTOCOL, _CT_PORT, _CT_PACKETS, _CT_V4, _CT_V6 = 2, 10, 12, 14, 20, 22  # NFT_CT_*
_PACKETS = 16  # about as kindnet and kube-proxy's prototype, which have 20
_MANY = 0xFFFFFFFF & -_PACKETS  # of a number's lower half, on little-endian; a power of two
_ANSWERED = SEEN_REPLY | DESTINATION_NAT


class FrontendSet(NamedTuple):
    """One family's set of frontends. ``data_type`` is for nft(8): address . protocol . service.

    ``registers``: of protocol and port, behind the address, as the kernel dumps them.
    """

    name: str
    address_key: int  # NFT_CT_*
    address_size: int
    data_type: int
    registers: tuple[int, int]

    @property
    def key_size(self) -> int:
        return self.address_size + 8


FRONTEND_SETS = (
    FrontendSet("frontends-v4", _CT_V4, 4, 7 << 12 | 12 << 6 | 13, (9, 10)),
    FrontendSet("frontends-v6", _CT_V6, 16, 8 << 12 | 12 << 6 | 13, (2, 13)),
)


class Contents(NamedTuple):
    """The content of a flowtable; ``frontends`` are elements of the sets (``element``)."""

    devices: Mapping[str, int]  # name -> ifindex
    frontends: frozenset[bytes]


def element(address: bytes, protocol: int, port: int) -> bytes:
    """Return a frontend in the sets' format; ``address`` is packed, in 4 or 16 bytes."""
    return address + struct.pack(">B3xH2x", protocol, port)


def read(table: Name) -> Contents | None:
    """Return the content; None if chain, rules or flowtable differ from those of ``write``.

    Raises Refused.
    """
    there = nft.dump(table, nft.GET_RULE, encode({1: to_text(table.table)}))
    wanted = [each.tree for each in _rules(table)]
    devices = _devices(table)
    has_rules = len(there) == len(wanted) and all(map(has_attributes, there, wanted))
    if devices is None or not has_rules:
        return None
    elements = (item for frontend_set in FRONTEND_SETS for item in _elements(table, frontend_set))
    return Contents(devices, frozenset(elements))


def _devices(table: Name) -> dict[str, int] | None:
    for found in map(attributes, nft.dump(table, nft.GET_FLOWTABLE)):
        if (found[1], found[2]) == (table.table.encode() + b"\0", FLOWTABLE.encode() + b"\0"):
            items = list_items(attributes(found[3]).get(3, b""))
            names = {name.rstrip(b"\0").decode() for name in items}
            return {name: index for index, name in socket.if_nameindex() if name in names}
    return None


def _elements(table: Name, frontend_set: FrontendSet) -> Iterator[bytes]:
    for message in nft.own_elements(table, frontend_set.name):
        for found in list_items(attributes(message).get(3, b"")):
            yield attributes(attributes(found)[1])[1]


def write(table: Name, wanted: Contents) -> None:
    """Create it in one transaction, instead of one that may be there. Ends all offloads.

    Raises Refused, also if a device does not exist.
    """
    name, made = to_text(table.table), Transaction(table)
    for kind in (nft.NEW_TABLE, nft.DELETE_TABLE, nft.NEW_TABLE):
        made.add(kind, encode({1: name}))
    made.add(nft.NEW_FLOWTABLE, *_flowtable(table, ()))
    for place, each in enumerate(FRONTEND_SETS, start=1):
        frontends = rules.set_of(each.name, (each.data_type, each.key_size), table=table)
        made.add(nft.NEW_SET, encode({**frontends, 10: to_number(place)}))
    made.add(nft.NEW_CHAIN, encode(rules.inner_chain(name, _LONG)))
    made.add(nft.NEW_CHAIN, encode(rules.base_chain(name, CHAIN, "filter", _FORWARD, _PRIORITY)))
    for rule in _rules(table):
        made.add(nft.NEW_RULE, encode(rule.tree))
    _add_devices(made, table, wanted.devices)
    _change_frontends(made, table, nft.NEW_ELEMENTS, wanted.frontends)
    made.commit()


def change(table: Name, former: Contents, wanted: Contents) -> None:
    """Add devices, and add and remove frontends, in one transaction. Offloads go on.

    The kernel itself removes a device that goes away. Raises Refused as ``write``.
    """
    made = Transaction(table)
    added = wanted.devices.items() - former.devices.items()
    _add_devices(made, table, [name for name, _ in added])
    _change_frontends(made, table, nft.DELETE_ELEMENTS, former.frontends - wanted.frontends)
    _change_frontends(made, table, nft.NEW_ELEMENTS, wanted.frontends - former.frontends)
    if made:
        made.commit()


def _rules(table: Name) -> Iterator[rules.Rule]:
    """Yield the rules, by chains as the kernel has them: answered, translated connections of some
    length enter the flowtable. Packets of shorter ones meet one rule, and expressions that the
    kernel has in line.
    """
    for frontends in FRONTEND_SETS:
        expressions = (
            load_ct(_CT_STATUS),
            rules.mask(_ANSWERED),
            rules.compare(struct.pack("=I", _ANSWERED)),
            load_ct(frontends.address_key, original=True),
            load_ct(_CT_PROTOCOL, frontends.registers[0], original=True),
            load_ct(_CT_PORT, frontends.registers[1], original=True),
            rules.look_up(frontends.name),
            rules.expression("flow_offload", {1: to_text(FLOWTABLE)}),
        )
        yield rules.Rule(_LONG, f"connections to {frontends.name}", expressions, table)
    is_long = load_ct(_CT_PACKETS), rules.mask(_MANY), rules.compare(bytes(4), rules.NOT_EQUAL)
    comment = f"from packet {_PACKETS} on"
    yield rules.Rule(CHAIN, comment, (*is_long, rules.goto(_LONG)), table)


def _flowtable(table: Name, devices: Iterable[str]) -> tuple[bytes, ...]:
    names = nested(3, *(text(1, name) for name in devices))
    hook = nested(3, encode({1: to_number(_INGRESS), 2: to_number(0)}), names)
    return text(1, table.table), text(2, FLOWTABLE), hook


def _add_devices(made: Transaction, table: Name, names: Iterable[str]) -> None:
    names = sorted(names)
    for at in range(0, len(names), _DEVICES_AT_ONCE):
        made.add(nft.NEW_FLOWTABLE, *_flowtable(table, names[at : at + _DEVICES_AT_ONCE]))


def _change_frontends(made: Transaction, table: Name, kind: int, found: Iterable[bytes]) -> None:
    for frontend_set in FRONTEND_SETS:
        names = {1: to_text(table.table), 2: to_text(frontend_set.name)}
        own = sorted(item for item in found if len(item) == frontend_set.key_size)
        for at in range(0, len(own), _AT_ONCE):
            keys = [{1: {1: item}} for item in own[at : at + _AT_ONCE]]
            made.add(kind, encode({**names, 3: keys}))


# Whether this kernel has flowtables (nf_flow_table, nft_flow_offload): one is created to find out.
#
# The test uses a temporary network namespace, so that no packet passes it. It loads the needed
# modules, if they are installed.


def flowtable_obstacle() -> str | None:
    """Return why there cannot be a flowtable; None if there can."""
    try:
        call_in_new(lambda: write(TABLE, Contents({"lo": 1}, frozenset())))
    except (NodeError, OSError) as error:
        return f"the kernel can make no flowtable ({in_words(error)})"
    return None


# The wanted content of the kernel's flowtable, and its synchronization.
#
# The agent's loop sets the content; the thread that watches the engine's table (watch.py) writes
# it, so that the loop never waits for nf_tables. A pod that comes adds a device, and no offload
# ends. Everything is written again, which ends all offloads until their next packet, only when a
# device that exists must leave, and when another program has removed the flowtable or its rules.

_PROTOCOLS = (Protocol.TCP, Protocol.UDP)  # the protocols that the kernel takes


class FlowtableSync:
    """Keep the flowtable's content.

    ``on_change`` is called, in the loop's thread, when there is anything to write. Nothing is
    written before devices and frontends are known.
    """

    def __init__(
        self, *, is_wanted: bool, missing: str | None = None, off: str | None = None
    ) -> None:
        """``missing``: why this kernel has no flowtable, if one is wanted. ``off`` as in allow."""
        self.enabled, self.missing = is_wanted and not missing, missing
        self._off = off
        self.on_change: Callable[[], None] = lambda: None
        self._place: tuple[Mapping[str, int], frozenset[Address]] | None = None
        self._frontends: frozenset[Frontend] | None = None
        self._must_end = False
        self._made: Contents | None = None  # last written; None: must be read from the kernel

    def place(self, devices: Iterable[Device], addresses: Iterable[Address]) -> None:
        """Set the served devices, and the addresses of NodePorts."""
        found = {device.name: device.index for device in devices}, frozenset(addresses)
        if self.enabled and found != self._place:
            self._place = found
            self.on_change()

    def allow(self, off: str | None) -> None:
        """Set why there is no flowtable now, or None; without one its flows pass the stack."""
        former, self._off = self._off, off
        if self.enabled and bool(off) != bool(former):
            self.on_change()

    def end_flows(self) -> None:
        """Lead all connections through the stack again; each returns with its next packet."""
        if self.enabled:
            self._must_end = True
            self.on_change()

    def start_over(self, frontends: Iterable[Frontend]) -> None:
        """Set the complete list of frontends."""
        if self.enabled:
            self._frontends = frozenset(frontends)
            self.on_change()

    def written(self, plan: Plan) -> None:
        """Apply a plan's changes of frontends, once all frontends are known."""
        if self._frontends is None:
            return
        new = {frontend for frontend, _ in plan.services} - self._frontends
        gone = self._frontends.intersection(plan.removed_services)
        if new or gone:
            self._frontends = (self._frontends | new) - gone
            self.on_change()

    def look(self, *, needed: bool, report_only: bool) -> list[str]:
        """Compare everything with the content last written; return the differences in words.

        Differences are corrected, unless ``report_only``. Raises NodeError.
        """
        if not self._may_be(needed=needed):
            self._remove()
            return []
        found, made = read(TABLE), self._made
        differs = differences(found, made) if made else []
        if not (differs and report_only):
            self._made = found
            self._write()
        return differs

    def catch_up(self, *, needed: bool) -> None:
        """Write the changes since the last time, without comparing. Raises NodeError."""
        may_be = self._may_be(needed=needed)
        if self._must_end or (self._made and not may_be):
            self._remove()
            self._must_end = False
        if may_be:
            self._made = self._made or read(TABLE)
            self._write()

    @property
    def said(self) -> str | None:
        """The state for the operator; None if no flowtable is wanted."""
        if not self.enabled:
            return self.missing and f"none: {self.missing}"
        if self._off:
            return f"none: {self._off}"
        return f"active on {len(self._made.devices) if self._made else 0} devices"

    def _may_be(self, *, needed: bool) -> bool:
        return needed and self.enabled and not self._off

    def _write(self) -> None:
        """Write twice if a device was removed meanwhile: the kernel refuses its name."""
        try:
            self._try_to_write()
        except nft.Refused:
            self._try_to_write()

    def _try_to_write(self) -> None:
        if self._place is None or self._frontends is None:
            return
        devices, addresses = self._place
        wanted = Contents(_existing(devices), elements(self._frontends, addresses))
        if self._made and _existing(self._made.devices).keys() <= wanted.devices.keys():
            change(TABLE, self._made, wanted)
        else:
            write(TABLE, wanted)
        self._made = wanted

    def _remove(self) -> None:
        self._made = None
        nft.delete(TABLE)


def _existing(devices: Mapping[str, int]) -> dict[str, int]:
    return {name: index for index, name in socket.if_nameindex() if devices.get(name) == index}


def elements(frontends: Iterable[Frontend], addresses: Iterable[Address]) -> frozenset[bytes]:
    """Return elements of the sets.

    A NodePort is a frontend at each of these addresses of its family.
    """
    addresses = tuple(addresses)
    found = set()
    for address, port, protocol in (each for each in frontends if each.protocol in _PROTOCOLS):
        of_node = (it for it in addresses if it.version == address.version)
        for each in of_node if address.is_unspecified else (address,):
            found.add(element(each.packed, protocol, port))
    return frozenset(found)


def differences(found: Contents | None, made: Contents) -> list[str]:
    """Return the differences in words; the kernel itself removes a device that goes away."""
    if found is None:
        return ["the flowtable or its rules had been removed or changed by another program"]
    lost = sorted(_existing(made.devices).keys() - found.devices.keys())
    said = [f"the flowtable's device {name} was missing" for name in lost]
    if changed := len(made.frontends ^ found.frontends):
        said.append(f"{changed} frontends were missing or unknown in the flowtable's sets")
    return said
