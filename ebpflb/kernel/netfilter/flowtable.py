# SPDX-License-Identifier: Apache-2.0
"""The kernel's flowtable, in an nft table of its own (--fast-forward with netfilter).

A connection to one of the ``frontends`` bypasses the stack after its endpoint has answered: at its
19th packet, both directions counted, or the next one in FORWARD, behind all rules that could drop
it, it enters the flowtable. From then on the hook of a device sends its packets directly to the
next device. conntrack does not show who translated a connection. So each family has a set of
frontends, and the original destination must be in it: connections that other programs translate
stay in the stack.

The rule asks conntrack how many packets have passed. So the kernel turns on conntrack's accounting
in this network namespace (net.netfilter.nf_conntrack_acct), where it stays on. Connections that
were opened before have no count, and stay in the stack.

The kernel takes TCP only when it is established and returns it to the stack at FIN and RST. It also
returns packets that are too long for the next device, or whose TTL ends. Only TCP and UDP are
taken.
"""

import logging
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from ebpflb.entries.flows import DESTINATION_NAT, SEEN_REPLY
from ebpflb.entries.services import Frontend
from ebpflb.errors import NodeError, in_words
from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter import table as rules
from ebpflb.kernel.netfilter.nft import (
    DELETE_ELEMENTS,
    DELETE_FLOWTABLE,
    GET_FLOWTABLE,
    GET_RULE,
    NEW_CHAIN,
    NEW_ELEMENTS,
    NEW_FLOWTABLE,
    NEW_RULE,
    NEW_SET,
    NEW_TABLE,
    Name,
    Refused,
    Transaction,
    dump,
    own_elements,
)
from ebpflb.kernel.netfilter.table import Rule, load_ct
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
_PRIORITY = 300  # behind the filters (0) and the tables of SELinux (50 to 225)
_FORWARD, _INGRESS = 2, 0  # NF_INET_FORWARD, NF_NETDEV_INGRESS
_AT_ONCE = 1000  # elements in one message, whose attribute has at most 64 KiB
_DEVICES_AT_ONCE = 128  # of the kernel's maximum of 256 in a message (NFT_NETDEVICE_MAX)

_CT_STATUS, _CT_PROTOCOL, _CT_PORT, _CT_PACKETS, _CT_V4, _CT_V6 = 2, 10, 12, 14, 20, 22  # NFT_CT_*
_PACKETS = struct.pack(">Q", 19)  # as kindnet and kube-proxy's prototype
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

    devices: frozenset[str]
    frontends: frozenset[bytes]


EMPTY_FLOWTABLE = Contents(frozenset(), frozenset())


def element(address: bytes, protocol: int, port: int) -> bytes:
    """Return a frontend in the sets' format; ``address`` is packed, in 4 or 16 bytes."""
    return address + struct.pack(">B3xH2x", protocol, port)


def read(table: Name) -> Contents | None:
    """Return the content; None if chain, rules or flowtable differ from those of ``make``.

    Raises Refused.
    """
    there = dump(table, GET_RULE, encode({1: to_text(table.table), 2: to_text(CHAIN)}))
    wanted = [_rule(table, each).tree for each in FRONTEND_SETS]
    devices = _devices(table)
    if devices is None or len(there) != len(wanted) or not all(map(has_attributes, there, wanted)):
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
    for message in own_elements(table, frontend_set.name):
        for found in list_items(attributes(message).get(3, b"")):
            yield attributes(attributes(found)[1])[1]


def make(table: Name) -> None:
    """Create it again, without devices and frontends, in a table that may be missing.

    Raises Refused.
    """
    remove(table)
    name, made = to_text(table.table), Transaction(table)
    made.add(NEW_TABLE, encode({1: name}))
    made.add(NEW_FLOWTABLE, *_flowtable(table, ()))
    for place, each in enumerate(FRONTEND_SETS, start=1):
        frontends = rules.set_of(each.name, (each.data_type, each.key_size), table=table)
        made.add(NEW_SET, encode({**frontends, 10: to_number(place)}))
    made.add(NEW_CHAIN, encode(rules.base_chain(name, CHAIN, "filter", _FORWARD, _PRIORITY)))
    for each in FRONTEND_SETS:
        made.add(NEW_RULE, encode(_rule(table, each).tree))
    made.commit()


def _rule(table: Name, frontends: FrontendSet) -> Rule:
    """Return the rule: answered, translated connections of some length enter the flowtable."""
    expressions = (
        *(load_ct(_CT_STATUS), rules.mask(_ANSWERED), rules.compare(struct.pack("=I", _ANSWERED))),
        *(load_ct(_CT_PACKETS), rules.to_network_order(8), rules.compare(_PACKETS, rules.AT_LEAST)),
        load_ct(frontends.address_key, original=True),
        load_ct(_CT_PROTOCOL, frontends.registers[0], original=True),
        load_ct(_CT_PORT, frontends.registers[1], original=True),
        rules.look_up(frontends.name),
        rules.expression("flow_offload", {1: to_text(FLOWTABLE)}),
    )
    comment = f"connections to {frontends.name}, from packet 19 on"
    return Rule(CHAIN, comment, expressions, table)


def _flowtable(table: Name, devices: Iterable[str]) -> tuple[bytes, ...]:
    names = nested(3, *(text(1, name) for name in devices))
    hook = nested(3, encode({1: to_number(_INGRESS), 2: to_number(0)}), names)
    return text(1, table.table), text(2, FLOWTABLE), hook


def add_devices(table: Name, names: Collection[str]) -> dict[str, str]:
    """Add devices; return device -> reason for those that the kernel refuses."""
    names = sorted(names)
    refused: dict[str, str] = {}
    for at in range(0, len(names), _DEVICES_AT_ONCE):
        some = names[at : at + _DEVICES_AT_ONCE]
        if _change_devices(table, NEW_FLOWTABLE, some):
            answers = {name: _change_devices(table, NEW_FLOWTABLE, [name]) for name in some}
            refused |= {name: str(error) for name, error in answers.items() if error}
    return refused


def remove_devices(table: Name, names: Iterable[str]) -> None:
    """Remove devices; the kernel has already removed a device that no longer exists."""
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
    """Apply all changes at once. Raises Refused."""
    change = Transaction(table)
    for kind, elements in ((DELETE_ELEMENTS, sorted(gone)), (NEW_ELEMENTS, sorted(new))):
        for frontend_set in FRONTEND_SETS:
            own = [item for item in elements if len(item) == frontend_set.key_size]
            for at in range(0, len(own), _AT_ONCE):
                keys = [{1: {1: item}} for item in own[at : at + _AT_ONCE]]
                names = {1: to_text(table.table), 2: to_text(frontend_set.name)}
                change.add(kind, encode({**names, 3: keys}))
    if change:
        change.commit()


def remove(table: Name) -> None:
    """Remove the flowtable; its flows continue through the stack. Raises NodeError."""
    nft.delete(table)


# Whether this kernel has flowtables (nf_flow_table, nft_flow_offload): one is created to find out.
#
# The test uses a temporary network namespace, so that no packet passes it. It loads the needed
# modules, if they are installed.


def flowtable_obstacle() -> str | None:
    """Return why there cannot be a flowtable; None if there can."""
    try:
        refused = call_in_new(_try)
    except (NodeError, OSError) as error:
        return f"the kernel can make no flowtable ({in_words(error)})"
    return next(iter(refused.values()), None)


def _try() -> dict[str, str]:
    """Create the engine's flowtable at the new namespace's loopback."""
    make(TABLE)
    return add_devices(TABLE, ["lo"])


# The wanted content of the kernel's flowtable, and its synchronization.
#
# The agent's loop sets the content; the thread that watches the engine's table (watch.py) writes
# it, so that the loop never waits for nf_tables.

log = logging.getLogger(__name__)

_PROTOCOLS = (Protocol.TCP, Protocol.UDP)  # the protocols that the kernel takes


class InFlowtable(NamedTuple):
    """The wanted content of a flowtable."""

    devices: Mapping[str, int]  # name -> ifindex
    frontends: frozenset[bytes]  # elements of the sets


class FlowtableSync:
    """Keep the flowtable's content.

    ``left_out``: device -> why the kernel refuses it, for wanted devices. ``on_change`` is called,
    in the loop's thread, when there is anything to write. Nothing is written before devices and
    frontends are known.
    """

    def __init__(
        self, *, is_wanted: bool, missing: str | None = None, off: str | None = None
    ) -> None:
        """``missing``: why this kernel has no flowtable, if one is wanted. ``off`` as in allow."""
        self.enabled, self.missing = is_wanted and not missing, missing
        self._off = off
        self.on_change: Callable[[], None] = lambda: None
        self.left_out: Mapping[str, str] = {}
        self._lock = threading.Lock()
        self._devices: Mapping[str, int] | None = None
        self._addresses: frozenset[Address] = frozenset()
        self._frontends: frozenset[Frontend] | None = None
        self._changed = self._must_end = False
        self._made: InFlowtable | None = None  # the content last written; None: must be compared

    def place(self, devices: Iterable[Device], addresses: Iterable[Address]) -> None:
        """Set the served devices, and the addresses of NodePorts."""
        found = {device.name: device.index for device in devices}, frozenset(addresses)
        if self.enabled and (found != (self._devices, self._addresses) or not self._made):
            with self._lock:
                self._devices, self._addresses = found
                self._changed = True
            self.on_change()

    def allow(self, off: str | None) -> None:
        """Set why there is no flowtable now, or None; without one its flows pass the stack."""
        former, self._off = self._off, off
        if self.enabled and bool(off) != bool(former):
            self._changed = not off
            self.on_change()

    def end_flows(self) -> None:
        """Lead all connections through the stack again; each returns with its next packet."""
        if self.enabled:
            self._must_end = self._changed = True
            self.on_change()

    def start_over(self, frontends: Iterable[Frontend]) -> None:
        """Set the complete list of frontends."""
        if self.enabled:
            with self._lock:
                self._frontends = frozenset(frontends)
                self._changed = True
            self.on_change()

    def written(self, plan: Plan) -> None:
        """Apply a plan's changes of frontends, once all frontends are known."""
        if self._frontends is None:
            return
        new = {frontend for frontend, _ in plan.services} - self._frontends
        gone = self._frontends.intersection(plan.removed_services)
        if new or gone:
            with self._lock:
                self._frontends = (self._frontends | new) - gone
                self._changed = True
            self.on_change()

    def look(self, *, needed: bool, report_only: bool) -> list[str]:
        """Compare everything with the content last written; return the differences in words.

        Differences are corrected, unless ``report_only``. Raises NodeError.
        """
        if not (needed and self.enabled and not self._off):
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
        """Write the changes since the last time, without comparing. Raises NodeError."""
        if self._must_end or (self._made and self._off):
            self._remove()
            self._must_end = False
        is_ready = needed and self.enabled and not self._off and self._is_known
        if not (is_ready and self._changed):
            return
        made = self._made
        known = made and Contents(frozenset(made.devices), made.frontends)
        self._write(known or read(TABLE))

    @property
    def said(self) -> str | None:
        """The state for the operator; None if no flowtable is wanted."""
        if not self.enabled:
            return self.missing and f"none: {self.missing}"
        if self._off:
            return f"none: {self._off}"
        out = "; ".join(f"{name} is left out: {why}" for name, why in sorted(self.left_out.items()))
        count = len(self._made.devices) if self._made else 0
        return f"active on {count} devices" + (f"; {out}" if out else "")

    @property
    def _is_known(self) -> bool:
        return self._devices is not None and self._frontends is not None

    def _write(self, found: Contents | None) -> None:
        former, self._made = self._made, None  # None until everything is written
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
    """Return those that still exist: the next list of devices will not have the others."""
    names = {name for _, name in socket.if_nameindex()}
    return {name: why for name, why in refused.items() if name in names}


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


def differences(found: Contents | None, made: InFlowtable) -> list[str]:
    """Return the differences in words; the kernel itself removes a device that goes away."""
    if found is None:
        return ["the flowtable or its rules had been removed or changed by another program"]
    there = {name: index for index, name in socket.if_nameindex()}
    missing = sorted(made.devices.keys() - found.devices)
    lost = [name for name in missing if there.get(name) == made.devices[name]]
    said = [f"the flowtable's device {name} was missing" for name in lost]
    counts = len(made.frontends - found.frontends), len(found.frontends - made.frontends)
    names = ("frontends missing from the flowtable's sets", "extra entries in the flowtable's sets")
    return said + [f"{count} {name}" for count, name in zip(counts, names, strict=True) if count]
