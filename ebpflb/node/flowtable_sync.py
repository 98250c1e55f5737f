# SPDX-License-Identifier: Apache-2.0
"""What the kernel's flowtable (flowtable.py) is to hold, and that it holds it.

The agent's loop says what is to be in it; the thread that watches the engine's table (nat_watch)
writes it there, so that the loop never waits for nf_tables.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.devices import Device
from ebpflb.model.services import Protocol
from ebpflb.node import flowtable
from ebpflb.node.flowtable import EMPTY_FLOWTABLE, Contents
from ebpflb.plan.entries import Frontend
from ebpflb.plan.plan import Plan

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
        found, made = flowtable.read(flowtable.TABLE), self._made
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
        self._write(known or flowtable.read(flowtable.TABLE))

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
            flowtable.make(flowtable.TABLE)
            found = EMPTY_FLOWTABLE
        known = former.devices if former else {}
        has = {name for name in found.devices if known.get(name) == wanted.devices.get(name)}
        flowtable.remove_devices(flowtable.TABLE, found.devices - wanted.devices.keys())
        refused = flowtable.add_devices(flowtable.TABLE, wanted.devices.keys() - has)
        new, gone = wanted.frontends - found.frontends, found.frontends - wanted.frontends
        flowtable.change_frontends(flowtable.TABLE, new, gone)
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
        flowtable.remove(flowtable.TABLE)


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
            found.add(flowtable.element(each.packed, protocol, port))
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
