# SPDX-License-Identifier: Apache-2.0
"""The devices of this network namespace and their addresses, now and as they change."""

import errno
import math
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from ipaddress import ip_address
from struct import Struct
from typing import NamedTuple

import msgspec

from ebpflb.errors import instead_of_os_error
from ebpflb.kernel import netlink
from ebpflb.kernel.node.sysctls import bridge_calls
from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device, Devices, masters_for_ports
from ebpflb.model.events import SourceStatus
from ebpflb.model.kube_proxy import DEVICE
from ebpflb.workers import DescriptorWorker, Poller

# rtnetlink's messages (linux/rtnetlink.h, linux/if_link.h, linux/if_addr.h).
_REMOVED_LINK, _GET_LINK, _GET_ADDRESS = 17, 18, 22  # RTM_DELLINK, RTM_GETLINK, RTM_GETADDR
_ABOUT_DEVICES = {16, _REMOVED_LINK, 20, 21}  # RTM_NEWLINK, RTM_NEWADDR, RTM_DELADDR
_INDEX = Struct("=4xI")  # of both headers that follow
LINK_HEADER = Struct("=BxHiII")  # struct ifinfomsg
_LINK_ADDRESS, _NAME, _MASTER, _LINK_INFO = 1, 3, 10, 18  # IFLA_*
_KIND, _DATA, _SLAVE_KIND, _SLAVE_DATA = 1, 2, 4, 5  # IFLA_INFO_*
_BRIDGE = netlink.to_text("bridge")
_HAIRPIN_MODE = 4  # IFLA_BRPORT_MODE
# IFLA_BR_VLAN_FILTERING, IFLA_BR_NF_CALL_IPTABLES, IFLA_BR_NF_CALL_IP6TABLES
_NOT_PLAIN = 7, 36, 37
_ADDRESS_HEADER = Struct("=BBBBI")  # struct ifaddrmsg
_PEER, _OWN = 1, 2  # IFA_ADDRESS, IFA_LOCAL
_ETHER, _LOOPBACK = 1, 772  # ARPHRD_*: the kernel gives both kinds of packets an Ethernet header
_IFF_LOOPBACK = 8
# IFA_F_SECONDARY (IPv6: temporary), _DADFAILED, _DEPRECATED, _TENTATIVE
_UNFIT = 0x01 | 0x08 | 0x20 | 0x40
_RT_SCOPE_UNIVERSE = 0
_ADDRESSES = 1, 5, 9  # RTNLGRP_LINK, RTNLGRP_IPV4_IFADDR, RTNLGRP_IPV6_IFADDR
RELIST_SECONDS = 1.0  # pause after a failed listing
# How often br_netfilter's sysctls are read, which change without an event: while a bridge may be
# served instead of its port, and with other bridges, where nothing is urgent.
_UPLINK_SECONDS, _BRIDGE_SECONDS = 0.25, 5.0


class DevicesChanged(msgspec.Struct, frozen=True):
    """All devices that exist now, except the one of kube-proxy's ipvs mode (``has_ipvs``).

    That device has every cluster IP, and none of them is an address of the node.
    """

    devices: Devices
    has_ipvs: bool = False

    @property
    def addresses(self) -> frozenset[Address]:
        return frozenset(address for device in self.devices for address in device.addresses)


def list_devices() -> DevicesChanged:
    """Return the devices in this network namespace. Raises NodeError."""
    return DeviceTable().read()


class _OwnAddress(NamedTuple):
    """An address of a device; whether the kernel would select it as a source."""

    address: Address
    is_source: bool


_Addresses = Mapping[int, list[_OwnAddress]]  # by the index of their device


class DeviceTable:
    """The devices by index; after a change only those that the kernel's messages name are read
    again. A node of 500 pods gets some ten messages for another pod.
    """

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}
        self._changed: set[int] | None = None  # since the last ``read``; None: any may have
        self._count = 0  # of devices that were new, for ``Device.number``
        self._bridges_call = False  # whether br_netfilter's sysctls let all bridges call netfilter
        self.poll_seconds = math.inf  # how long ``note_bridge_calls`` may wait; known by ``read``

    def note(self, messages: Iterable[tuple[int, bytes]]) -> None:
        """Note the devices that these messages of the kernel are about: types and contents."""
        for kind, content in messages:
            if kind in _ABOUT_DEVICES and self._changed is not None:
                (index,) = _INDEX.unpack_from(content)
                self._changed.add(index)
                if kind == _REMOVED_LINK:
                    self._devices.pop(index, None)

    def note_loss(self) -> None:
        """Note that messages were lost."""
        self._changed = None

    def note_bridge_calls(self) -> bool:
        """Read br_netfilter's sysctls; return whether ``read`` may differ because of them."""
        before, self._bridges_call = self._bridges_call, any(bridge_calls().values())
        if before != self._bridges_call:
            self._changed = None
        return before != self._bridges_call

    def read(self) -> DevicesChanged:
        """Return the devices as they are now. Raises NodeError; then all are read again."""
        self.note_bridge_calls()
        changed, self._changed = self._changed, None
        with instead_of_os_error("devices cannot be listed"):
            self._read(changed)
            every = (self._devices[index] for index in sorted(self._devices))
            devices = tuple(device for device in every if device.name != DEVICE)
            self.poll_seconds = _poll_seconds(devices)
        self._changed = set()
        return DevicesChanged(devices, has_ipvs=len(devices) < len(self._devices))

    def _read(self, changed: set[int] | None) -> None:
        if changed is None:
            self._devices.clear()
            links = netlink.dump(_GET_LINK, bytes(LINK_HEADER.size))
            addresses = _by_device(netlink.dump(_GET_ADDRESS, bytes(_ADDRESS_HEADER.size)))
        else:
            links = list(_links_at(changed))
            addresses = _by_device(_addresses_at(changed))
        for link in links:
            self._keep(link, addresses)

    def _keep(self, link: bytes, addresses: _Addresses) -> None:
        (index,) = _INDEX.unpack_from(link)
        former = self._devices.pop(index, None)
        self._count += former is None
        number = former.number if former else self._count
        self._devices[index] = _device(link, addresses, number, bridges_call=self._bridges_call)


def _poll_seconds(devices: Devices) -> float:
    replacing = masters_for_ports(devices)
    if any(each.plain_bridge and each.index in replacing for each in devices):
        return _UPLINK_SECONDS
    return _BRIDGE_SECONDS if any(each.kind == "bridge" for each in devices) else math.inf


@contextmanager
def _may_be_gone() -> Iterator[None]:
    """Ignore that the device does not exist any more."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise


def _links_at(indexes: Collection[int]) -> Iterator[bytes]:
    """Yield the devices with these indexes that exist. Raises OSError."""
    with netlink.route_socket() as kernel:
        for index in indexes:
            with _may_be_gone():
                yield netlink.request(kernel, _GET_LINK, LINK_HEADER.pack(0, 0, index, 0, 0))


def _addresses_at(indexes: Collection[int]) -> Iterator[bytes]:
    """Yield the addresses of the devices with these indexes. Raises OSError."""
    for index in indexes:
        with _may_be_gone():
            header = _ADDRESS_HEADER.pack(0, 0, 0, 0, index)
            yield from netlink.dump(_GET_ADDRESS, header, strict=True)


def addresses_at(index: int) -> set[Address]:
    """Return the addresses of the device with this index; empty if it is gone. Raises OSError."""
    return {each.address for each in _by_device(_addresses_at([index])).get(index, ())}


def _by_device(listed: Iterable[bytes]) -> _Addresses:
    found: defaultdict[int, list[_OwnAddress]] = defaultdict(list)
    for message in listed:
        family, _, flags, scope, index = _ADDRESS_HEADER.unpack_from(message)
        if family in (socket.AF_INET, socket.AF_INET6):
            is_source = scope == _RT_SCOPE_UNIVERSE and not flags & _UNFIT
            found[index].append(_OwnAddress(_address(message), is_source))
    return found


def _device(message: bytes, addresses: _Addresses, number: int, *, bridges_call: bool) -> Device:
    _, kind, index, flags, _ = LINK_HEADER.unpack_from(message)
    found = netlink.attributes(message, LINK_HEADER.size)
    info = netlink.attributes(found.get(_LINK_INFO, b""))
    port = info.get(_SLAVE_DATA, b"") if info.get(_SLAVE_KIND) == _BRIDGE else b""
    has_link_header = kind in (_ETHER, _LOOPBACK)
    here = addresses.get(index, [])
    return Device(
        index=index,
        name=netlink.from_text(found[_NAME]),
        loopback=bool(flags & _IFF_LOOPBACK),
        link_header=has_link_header,
        master=int.from_bytes(found.get(_MASTER, b""), sys.byteorder),
        addresses=tuple(each.address for each in here),
        sources=tuple(each.address for each in here if each.is_source),
        kind=netlink.from_text(info.get(_KIND, b"")),
        hairpin=any(netlink.attributes(port).get(_HAIRPIN_MODE, b"")),
        plain_bridge=not bridges_call and _is_plain_bridge(info),
        mac=found.get(_LINK_ADDRESS, b"").hex(":") if has_link_header else "",
        number=number,
    )


def _is_plain_bridge(info: Mapping[int, bytes]) -> bool:
    """Return what the bridge's own settings say; br_netfilter's sysctls may say otherwise."""
    if info.get(_KIND) != _BRIDGE:
        return False
    settings = netlink.attributes(info.get(_DATA, b""))
    return not any(any(settings.get(each, b"")) for each in _NOT_PLAIN)


def _address(message: bytes) -> Address:
    """Return our address of a device.

    It is IFA_LOCAL, if present: on a point-to-point link IFA_ADDRESS is the peer's.
    """
    found = netlink.attributes(message, _ADDRESS_HEADER.size)
    return ip_address(found.get(_OWN, found.get(_PEER, b"")))


class DeviceWatch(DescriptorWorker):
    """Emit the list of devices at once and whenever it has changed, from a thread.

    A failed listing is repeated until it succeeds.
    """

    def __init__(self, emit: Callable[[DevicesChanged | SourceStatus], None]) -> None:
        super().__init__("devices")
        self.emit = emit
        self._table = DeviceTable()
        self._emitted: DevicesChanged | None = None
        self._changes = netlink.Subscription(*_ADDRESSES)
        self._poll = Poller("devices", self._report, emit)

    def start(self) -> None:
        """List the devices, then start the thread. Raises NodeError."""
        self._report()
        super().start()

    def run(self) -> None:
        if self.has_failed:
            self._table.note_loss()
            self._poll()
        while not self.stopped.is_set():
            changes = self.wait([self._changes], self._table.poll_seconds)
            if changes:
                self._take_changes()
            if changes or self._table.note_bridge_calls():
                while not (self._poll() or self.stopped.wait(RELIST_SECONDS)):
                    pass

    def _report(self) -> None:
        emitted, self._emitted = self._emitted, None  # after an error, any list is new
        found = self._table.read()
        if found != emitted:
            self.emit(found)
        self._emitted = found

    def _take_changes(self) -> None:
        """Take all messages so far; after a loss everything is read again."""
        if (messages := self._changes.take()) is not None:
            self._table.note(messages)
            return
        self._table.note_loss()
        self.stopped.wait(RELIST_SECONDS)
