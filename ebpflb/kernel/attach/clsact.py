# SPDX-License-Identifier: Apache-2.0
"""Attach programs to a device by clsact filters, on kernels without tcx.

    <folder>/<ifindex>-clsact    exists if our filters are at this device
    <folder>/<ifindex>-qdisc     exists if we have created its qdisc

A filter is ours if it has our priority, our handle, and our name, which contains the state
directory; no other filter is ever replaced or removed. The qdisc is removed with our filters only
if we created it, as far as the record says, and it has no other filters.

A device has either a qdisc clsact or a qdisc ingress, as the CNI plugin bandwidth creates it for a
pod with a limit. At the latter there is room for the program at ingress only. The netfilter engine
needs no more for a pod's requests; the flow tables translate replies at egress.
"""

import errno
import socket
import struct
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ebpflb.errors import KernelError
from ebpflb.kernel import netlink
from ebpflb.kernel.attach.cgroup_links import HeldLinks, Pinned
from ebpflb.kernel.attach.tcx import fault, indexes
from ebpflb.kernel.programs.loader import Program
from ebpflb.model.devices import Device
from ebpflb.model.events import Drift, Part

PARENTS = {"ingress": 0xFFFFFFF2, "egress": 0xFFFFFFF3}
PRIORITY = 2  # others use 1, and some remove the filters at their priority
HANDLE = 0xEB
_ALL = 3  # ETH_P_ALL
_NEW_QDISC, _REMOVE_QDISC, _GET_QDISC = 36, 37, 38  # RTM_*QDISC
_NEW_FILTER, _REMOVE_FILTER, _GET_FILTER = 44, 45, 46  # RTM_*TFILTER
_QDISC_HANDLE, _QDISC_PARENT = 0xFFFF0000, 0xFFFFFFF1  # TC_H_CLSACT
_HEADER = struct.Struct("=BxxxiIII")  # struct tcmsg: family, device, handle, parent, info
_KIND, _OPTIONS = 1, 2  # TCA_*
_BPF_CLASS, _BPF_FD, _BPF_NAME, _BPF_FLAGS = 3, 6, 7, 8  # TCA_BPF_*
_DIRECT_ACTION = 1  # TCA_BPF_FLAG_ACT_DIRECT
_BPF = "bpf"
Listed = tuple[int, int, int, dict[int, bytes]]  # device, handle, info, attributes
_QDISC, _OTHERS_QDISC = "clsact", "ingress"
_QDISCS = (_QDISC, _OTHERS_QDISC)  # qdiscs with filters at ingress


class Filter(NamedTuple):
    """A filter, as netlink identifies it."""

    priority: int
    handle: int
    kind: str
    name: str

    def __str__(self) -> str:
        """The filter for the operator, as tc(8) shows it."""
        return f"{self.kind} {self.name}".strip()


class OthersFilters(NamedTuple):
    """The names of filters before and after our priority."""

    early: list[str]
    late: list[str]


NO_FILTERS = OthersFilters([], [])


def add_qdisc(kernel: socket.socket, index: int) -> None:
    """Raises OSError; EEXIST: there is one."""
    netlink.request(kernel, _NEW_QDISC, _qdisc_request(index), netlink.ACK | netlink.NEW)


def put_filter(
    kernel: socket.socket, index: int, hook: str, handle: int, program: int, name: str
) -> None:
    """Add or replace the filter at our priority. Raises OSError."""
    options = netlink.nested(
        _OPTIONS,
        netlink.attribute(_BPF_FD, _native(program)),
        netlink.text(_BPF_NAME, name),
        netlink.attribute(_BPF_CLASS, _native(1)),
        netlink.attribute(_BPF_FLAGS, _native(_DIRECT_ACTION)),
    )
    content = _filter_request(index, hook, handle) + options
    netlink.request(kernel, _NEW_FILTER, content, netlink.ACK | netlink.REPLACE)


# Filters of several kinds share a qdisc: whoever removes the last one removes it, if it is ours.


def _take_qdisc(kernel: socket.socket, folder: Path, index: int) -> str:
    """Create the qdisc; one that exists without our filters is not ours. Return its kind.

    Raises OSError.
    """
    record = folder / f"{index}-qdisc"
    try:
        add_qdisc(kernel, index)
        record.mkdir(exist_ok=True)
    except OSError as error:
        if error.errno != errno.EEXIST:
            raise
        if record.exists() and not _has_ours(folder, index):
            record.rmdir()
        return _qdisc(kernel, index)
    return _QDISC


def _remove_ours(kernel: socket.socket, folder: Path, index: int, hook: str, ours: Filter) -> None:
    """Remove our filter, if it is there, and our qdisc, if no filter is left.

    The filters of a removed device are already gone. Raises OSError.
    """
    try:
        if ours not in _filters(index, hook):
            return
        request = _filter_request(index, hook, ours.handle)
        netlink.request(kernel, _REMOVE_FILTER, request, netlink.ACK)
        if (folder / f"{index}-qdisc").exists() and not any(_filters(index, it) for it in PARENTS):
            netlink.request(kernel, _REMOVE_QDISC, _qdisc_request(index), netlink.ACK)
    except OSError as error:
        if error.errno != errno.ENODEV:
            raise


def _forget_qdisc(folder: Path, index: int) -> None:
    """Delete the note that this agent made the qdisc, unless the qdisc still has our filter."""
    record = folder / f"{index}-qdisc"
    if record.exists() and not _has_ours(folder, index):
        record.rmdir()


def _has_ours(folder: Path, index: int) -> bool:
    """Whether the device has a filter of this state directory."""
    found = (each.name for hook in PARENTS for each in _filters(index, hook))
    return any(name.startswith(f"{folder.parent}:") for name in found)


def _qdisc_request(index: int) -> bytes:
    header = _HEADER.pack(0, index, _QDISC_HANDLE, _QDISC_PARENT, 0)
    return header + netlink.text(_KIND, _QDISC)


def _filter_request(index: int, hook: str, handle: int) -> bytes:
    info = PRIORITY << 16 | socket.htons(_ALL)
    return _HEADER.pack(0, index, handle, PARENTS[hook], info) + netlink.text(_KIND, _BPF)


def _native(number: int) -> bytes:
    return number.to_bytes(4, sys.byteorder)


class Clsact:
    """The filters of one state directory."""

    name, handle = "clsact", HANDLE

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.without_egress: set[int] = set()  # devices with a qdisc ingress, when last attached to

    def attach(self, index: int, programs: list[Program]) -> None:
        """Attach programs to a device. Raises KernelError; ENODEV: no such device."""
        with open_kernel() as kernel:
            kind = _take_qdisc(kernel, self.folder, index)
            self._record(index).mkdir(exist_ok=True)
            if kind == _OTHERS_QDISC:
                self.without_egress.add(index)
            else:
                self.without_egress.discard(index)
            for program in programs:
                if program.name == "ingress" or index not in self.without_egress:
                    self._replace_filter(kernel, index, program)

    def probably_attached(self, indexes: Collection[int]) -> set[int]:
        """Return those of the devices that should have our filters.

        Others may have removed them.
        """
        return self._with_qdisc().intersection(indexes) if indexes else set()

    def attached(self) -> set[int]:
        """Return the devices with our filter at ingress; takes 1 ms per device."""
        return {index for index in self._with_qdisc() if "ingress" in self.hooks_at(index)}

    def detach(self, indexes: Collection[int]) -> None:
        """Remove our filters from these devices, which may have been removed."""
        if not indexes:
            return
        with open_kernel() as kernel:
            for hook in PARENTS:  # ingress everywhere, then egress
                for index in indexes:
                    self.detach_hook(kernel, index, hook)
            for index in indexes:
                if self._record(index).exists():
                    self._record(index).rmdir()
                _forget_qdisc(self.folder, index)

    def detach_egress(self, index: int) -> None:
        with open_kernel() as kernel:
            self.detach_hook(kernel, index, "egress")

    def faults(
        self, device: Device, ours: Mapping[str, int], held: HeldLinks, pinned: Pinned
    ) -> Iterator[Drift]:
        """Yield differences from the state after ``attach``.

        Filters are recognized by their names, so only the device is used.
        """
        found = self.hooks_at(device.index)
        name, record = f"device {device.name}", self._record(device.index)
        if not record.exists():
            yield Drift(Part.PIN, name, f"has no record {record}")
        for hook in ours.keys() & set(_hooks(device.index, self.without_egress)):
            if text := fault(hook, int(hook in found), {}):
                yield Drift(Part.DEVICE, name, text)

    def pins(self, index: int, hooks: Collection[str] = ()) -> list[Path]:
        """Return no pins: filters have no links."""
        return []

    def others(self) -> dict[tuple[int, str], OthersFilters]:
        """Return device and hook -> the filters of other programs."""
        devices, without_egress = _with_qdisc(*_QDISCS), _with_qdisc(_OTHERS_QDISC)
        found = {
            (at, hook): _filters(at, hook) for at in devices for hook in _hooks(at, without_egress)
        }
        return {place: self._around(place[1], filters) for place, filters in found.items()}

    def _around(self, hook: str, filters: list[Filter]) -> OthersFilters:
        ours = f"{self.folder.parent}:"
        others = [f for f in filters if f.handle and not f.name.startswith(ours)]  # 0: a chain
        names = {f"{f} ({hook})": f.priority < PRIORITY for f in others}
        early = [name for name, is_early in names.items() if is_early]
        return OthersFilters(early, [name for name in names if name not in early])

    def _with_qdisc(self) -> set[int]:
        return self.recorded() & _with_qdisc(*_QDISCS)

    def _replace_filter(self, kernel: socket.socket, index: int, program: Program) -> None:
        hook, name = program.name, self._name(program.name)
        own = set(map(self._name, PARENTS))  # at a qdisc ingress older agents put both in one place
        for found in _filters(index, hook):
            if (found.priority, found.handle) == (PRIORITY, self.handle) and found.name not in own:
                what = f"{found.name or found.kind} has priority {PRIORITY} at {hook}"
                raise KernelError(what, errno.EEXIST, "remove it, or exclude the device")
        put_filter(kernel, index, hook, self.handle, program.fd, name)

    def detach_hook(self, kernel: socket.socket, index: int, hook: str) -> None:
        _remove_ours(kernel, self.folder, index, hook, self._filter(hook))

    def hooks_at(self, index: int) -> list[str]:
        """Return the hooks of a device that have our filter."""
        return [hook for hook in PARENTS if self._filter(hook) in _filters(index, hook)]

    def _filter(self, hook: str) -> Filter:
        return Filter(PRIORITY, self.handle, _BPF, self._name(hook))

    def _name(self, hook: str) -> str:
        return f"{self.folder.parent}:{hook}"

    def _record(self, index: int) -> Path:
        return self.folder / f"{index}-clsact"

    def recorded(self, hooks: Collection[str] = ()) -> set[int]:
        """Return the devices, by ifindex, that have a record, which is the same for all hooks."""
        found = self.folder.glob("*-clsact") if self.folder.is_dir() else ()
        return indexes(record.name.partition("-")[0] for record in found)


@contextmanager
def open_kernel() -> Iterator[socket.socket]:
    try:
        with netlink.route_socket() as kernel:
            yield kernel
    except OSError as error:
        raise KernelError("clsact", error.errno or 0, str(error.strerror)) from error


def _with_qdisc(*kinds: str) -> set[int]:
    """Return the devices that have a qdisc of these kinds."""
    listed = ((index, known) for index, _, _, known in _listed(_GET_QDISC))
    return {index for index, known in listed if netlink.from_text(known[_KIND]) in kinds}


def runs_before_packets(index: int, handle: int) -> bool:
    """Whether our filter with this handle, if it is there, runs before the packet program's."""
    order = [it.handle for it in _filters(index, "ingress") if it.priority == PRIORITY]
    return HANDLE not in order or handle not in order[order.index(HANDLE) :]


def _hooks(index: int, without_egress: Collection[int]) -> Collection[str]:
    return ("ingress",) if index in without_egress else PARENTS


def _qdisc(kernel: socket.socket, index: int) -> str:
    """Return the kind of the device's qdisc with filters at ingress. Raises OSError."""
    which = _HEADER.pack(0, index, 0, _QDISC_PARENT, 0)
    answer = netlink.request(kernel, _GET_QDISC, which, netlink.ECHO)
    return netlink.from_text(netlink.attributes(answer, _HEADER.size)[_KIND])


def _listed(kind: int, index: int = 0, parent: int = 0) -> Iterator[Listed]:
    try:
        for message in netlink.dump(kind, _HEADER.pack(0, index, 0, parent, 0)):
            _, there, handle, _, info = _HEADER.unpack_from(message)
            yield there, handle, info, netlink.attributes(message, _HEADER.size)
    except OSError as error:
        raise KernelError("clsact", error.errno or 0, str(error.strerror)) from error


def _filters(index: int, hook: str) -> list[Filter]:
    """Return all filters at ingress or egress of a device, in order.

    There are none if the device or its clsact qdisc is missing.
    """
    return [_filter(*it) for it in _listed(_GET_FILTER, index, PARENTS[hook])]


def _filter(_: int, handle: int, info: int, known: dict[int, bytes]) -> Filter:
    kind = netlink.from_text(known[_KIND])
    options = netlink.attributes(known.get(_OPTIONS, b"")) if kind == _BPF else {}
    return Filter(info >> 16, handle, kind, netlink.from_text(options.get(_BPF_NAME, b"")))
