# SPDX-License-Identifier: Apache-2.0
"""Attaches programs to a device by clsact filters, on kernels without tcx.

    <folder>/<ifindex>-clsact    exists if our filters are at this device
    <folder>/<ifindex>-qdisc     exists if we have created its qdisc

A filter is ours if it has our priority, our handle, and our name, which names the state
directory; no other filter is ever replaced or removed. The qdisc is removed with our filters only
if we have created it and it has no other filters.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from ebpflb.datapath.programs.loader import Program
from ebpflb.errors import KernelError

PARENTS = {"ingress": 0xFFFFFFF2, "egress": 0xFFFFFFF3}
PRIORITY = 2  # others use 1, and some remove the filters that they find there
HANDLE = 0xEB
_ALL = 3  # ETH_P_ALL
_QDISC = "clsact"


class Filter(NamedTuple):
    """A filter, as netlink identifies it."""

    priority: int
    handle: int
    kind: str
    name: str


class Clsact:
    """The filters of one state directory."""

    name = "clsact"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def attach(self, index: int, programs: list[Program]) -> None:
        """Attaches the programs to a device. Raises KernelError, ENODEV if the device is gone."""
        with _route() as route:
            self._prepare(route, index)
            for program in programs:
                self._put(route, index, program)

    def present(self) -> set[int]:
        """The devices, by ifindex, that have our filters, unless others have removed them."""
        with _route() as route:
            return self._present(route)

    def held(self) -> set[int]:
        """The devices with our filters at ingress and egress; takes 1 to 2 ms a device."""
        with _route() as route:
            there = self._present(route)
            return {i for i in there if all(self._ours(route, i, end) for end in PARENTS)}

    def prune(self, wanted: set[int]) -> None:
        """Removes our filters from all other devices."""
        gone = self.known() - wanted
        if not gone:
            return
        with _route() as route:
            for index in gone:
                self._detach(route, index)
                for record in ("clsact", "qdisc"):
                    if self._record(index, record).exists():
                        self._record(index, record).rmdir()

    def ahead(self, index: int, end: str) -> list[str]:
        """The filters that see a packet before ours."""
        with _route() as route:
            found = _filters(route, index, end)
        before = [f for f in found if f.priority < PRIORITY and f.handle]  # 0: the chain
        names = [f"{f.kind} {f.name}".strip() for f in before]
        return list(dict.fromkeys(names))

    def _present(self, route: IPRoute) -> set[int]:
        there = {q["index"] for q in route.get_qdiscs() if q.get_attr("TCA_KIND") == _QDISC}
        return self.known() & there

    def _prepare(self, route: IPRoute, index: int) -> None:
        """Creates the qdisc. One that exists without our filters is not ours."""
        record = self._record(index, "qdisc")
        try:
            route.tc("add", _QDISC, index)
            record.mkdir(exist_ok=True)
        except NetlinkError as error:
            if error.code != errno.EEXIST:
                raise
            if record.exists() and not any(self._ours(route, index, end) for end in PARENTS):
                record.rmdir()
        self._record(index, "clsact").mkdir(exist_ok=True)

    def _put(self, route: IPRoute, index: int, program: Program) -> None:
        end, name = program.name, self._name(program.name)
        for found in _filters(route, index, end):
            if (found.priority, found.handle) == (PRIORITY, HANDLE) and found.name != name:
                what = f"{found.name or found.kind} has priority {PRIORITY} at {end}"
                raise KernelError(what, errno.EEXIST, "remove it, or exclude the device")
        how = {"fd": program.fd, "name": name, "classid": 1, "direct_action": True}
        route.tc("replace-filter", "bpf", index, HANDLE, **_place(end), **how)

    def _detach(self, route: IPRoute, index: int) -> None:
        """Does nothing if the device has been removed: its filters are removed with it."""
        try:
            self._take_off(route, index)
        except NetlinkError as error:
            if error.code != errno.ENODEV:
                raise

    def _take_off(self, route: IPRoute, index: int) -> None:
        ours = [end for end in PARENTS if self._ours(route, index, end)]
        for end in ours:
            route.tc("del-filter", "bpf", index, HANDLE, **_place(end))
        empty = not any(_filters(route, index, end) for end in PARENTS)
        if ours and empty and self._record(index, "qdisc").exists():
            route.tc("del", _QDISC, index)

    def _ours(self, route: IPRoute, index: int, end: str) -> bool:
        mine = Filter(PRIORITY, HANDLE, "bpf", self._name(end))
        return mine in _filters(route, index, end)

    def _name(self, end: str) -> str:
        return f"{self.folder.parent}:{end}"

    def _record(self, index: int, what: str) -> Path:
        return self.folder / f"{index}-{what}"

    def known(self) -> set[int]:
        """The devices, by ifindex, that have a record."""
        found = self.folder.glob("*-clsact") if self.folder.is_dir() else ()
        return {int(record.name.partition("-")[0]) for record in found}


@contextmanager
def _route() -> Iterator[IPRoute]:
    try:
        with IPRoute() as route:
            yield route
    except (NetlinkError, OSError) as error:
        raise KernelError("clsact", error.args[0], str(error.args[-1])) from error


def _place(end: str) -> dict[str, int]:
    return {"parent": PARENTS[end], "prio": PRIORITY, "protocol": _ALL}


def _filters(route: IPRoute, index: int, end: str) -> list[Filter]:
    """All at ingress or egress of a device, in order; none if there is no clsact or no device."""
    return [_filter(message) for message in route.get_filters(index, parent=PARENTS[end])]


def _filter(message: Any) -> Filter:
    options = message.get_attr("TCA_OPTIONS")
    name = options.get_attr("TCA_BPF_NAME") if options else None
    kind = message.get_attr("TCA_KIND")
    return Filter(message["info"] >> 16, message["handle"], kind, str(name or ""))
