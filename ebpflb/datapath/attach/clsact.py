# SPDX-License-Identifier: Apache-2.0
"""Programs at a device by clsact filters: for kernels without tcx.

    <folder>/<ifindex>-clsact    our filters are at this device
    <folder>/<ifindex>-qdisc     and the qdisc that holds them is ours

A filter is ours if it has our priority, our handle, and our name, which names the state
directory; nothing else is ever replaced or taken off. The qdisc goes with our filters only if we
made it and it holds nothing else.
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
PRIORITY = 2  # others put theirs at 1, and some take off what they find there
HANDLE = 0xEB
_ALL = 3  # ETH_P_ALL
_QDISC = "clsact"


class Filter(NamedTuple):
    """A filter, as others know it."""

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
        """Puts the programs in force at a device. Raises KernelError, ENODEV where it is gone."""
        with _route() as route:
            self._prepare(route, index)
            for program in programs:
                self._put(route, index, program)

    def present(self) -> set[int]:
        """The devices, by ifindex, that have our filters as long as nobody took them off."""
        with _route() as route:
            return self._present(route)

    def held(self) -> set[int]:
        """Those at both of whose ends one is in force; a millisecond or two for each."""
        with _route() as route:
            there = self._present(route)
            return {i for i in there if all(self._ours(route, i, end) for end in PARENTS)}

    def prune(self, wanted: set[int]) -> None:
        """Takes off what is at other devices."""
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
        before = [f for f in found if f.priority < PRIORITY and f.handle]  # 0: of the chain
        names = [f"{f.kind} {f.name}".strip() for f in before]
        return list(dict.fromkeys(names))

    def _present(self, route: IPRoute) -> set[int]:
        there = {q["index"] for q in route.get_qdiscs() if q.get_attr("TCA_KIND") == _QDISC}
        return self.known() & there

    def _prepare(self, route: IPRoute, index: int) -> None:
        """A qdisc that is there without our filters is not the one that we made, if we did."""
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
                raise KernelError(what, errno.EEXIST, "take it off, or leave the device out")
        how = {"fd": program.fd, "name": name, "classid": 1, "direct_action": True}
        route.tc("replace-filter", "bpf", index, HANDLE, **_place(end), **how)

    def _detach(self, route: IPRoute, index: int) -> None:
        """A device that goes meanwhile takes all with it."""
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
    """All at one end of a device, in their order; none where it has no clsact, or is gone."""
    return [_filter(message) for message in route.get_filters(index, parent=PARENTS[end])]


def _filter(message: Any) -> Filter:
    options = message.get_attr("TCA_OPTIONS")
    name = options.get_attr("TCA_BPF_NAME") if options else None
    kind = message.get_attr("TCA_KIND")
    return Filter(message["info"] >> 16, message["handle"], kind, str(name or ""))
