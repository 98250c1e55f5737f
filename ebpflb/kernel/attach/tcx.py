# SPDX-License-Identifier: Apache-2.0
"""Attach programs to a device by tcx links (kernel 6.6): pinned, and replaced atomically.

    <folder>/<ifindex>-ingress, <folder>/<ifindex>-egress

A link stays with a device that moves to another network namespace, and outlives a deleted device.
Therefore a pin counts only if the device with its ifindex lists the link. Our programs are attached
first: they return TC_ACT_UNSPEC, so all programs after them see every packet, whereas no program
runs after one that returns TC_ACT_OK.
"""

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.attach.cgroup_links import HeldLinks, Pinned
from ebpflb.kernel.programs.loader import SCHED_CLS, Program
from ebpflb.model.devices import Device
from ebpflb.model.events import Drift, Part

TCX_HOOKS = {"ingress": 46, "egress": 47}  # attach types BPF_TCX_INGRESS, BPF_TCX_EGRESS
BEFORE = 8  # BPF_F_BEFORE without a reference: first in the list
_NO_DEVICE = 2**31 - 1
_PASS = bytes.fromhex("b7000000ffffffff9500000000000000")  # return TC_ACT_UNSPEC


def works() -> bool:
    """Whether the kernel has tcx: then attaching fails only for a missing device."""
    loaded = bpf.prog_load(name="probe", program_type=SCHED_CLS, code=_PASS)
    with bpf.closing(loaded) as program:
        try:
            bpf.link_create(program, _NO_DEVICE, TCX_HOOKS["ingress"])
        except KernelError as error:
            return error.errno == errno.ENODEV
    return True


class Tcx:
    """The links that are pinned in one folder."""

    name = "tcx"
    without_egress: Collection[int] = ()  # devices without room for a program at egress

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def attach(self, index: int, programs: list[Program]) -> None:
        """Attach programs to a device. Raises KernelError; ENODEV: no such device."""
        for program in programs:
            pin = self._pin(index, program.name)
            if self._update_link(pin, index, program):
                continue
            pin.unlink(missing_ok=True)
            made = bpf.link_create(program.fd, index, TCX_HOOKS[program.name], BEFORE)
            with bpf.closing(made) as link:
                bpf.pin(link, str(pin))

    def attached(self) -> set[int]:
        """Return the devices, by ifindex, that have our link at ingress."""
        return self.probably_attached(self.recorded())

    def probably_attached(self, indexes: Collection[int]) -> set[int]:
        """Return those of the devices that have our link at ingress."""
        return {index for index in indexes if "ingress" in self.programs(index)}

    def detach(self, indexes: Collection[int]) -> None:
        """Remove our links from these devices, which may have been removed."""
        for hook in TCX_HOOKS:  # ingress everywhere, then egress
            for index in indexes:
                detach(self._pin(index, hook))

    def detach_egress(self, index: int) -> None:
        detach(self._pin(index, "egress"))

    def programs(self, index: int) -> dict[str, int]:
        """Return the ids of our programs at a device, by "ingress" and "egress"."""
        found = {}
        for hook in TCX_HOOKS:
            with bpf.opened(self._pin(index, hook)) as link:
                if program := program_at(link, index, hook):
                    found[hook] = program
        return found

    def faults(
        self, device: Device, ours: Mapping[str, int], held: HeldLinks, pinned: Pinned
    ) -> Iterator[Drift]:
        """Yield differences from the state after ``attach``.

        ``ours``: hook -> program id. ``pinned`` as HeldLinks returns it, which saves three of four
        system calls.
        """
        for hook in ours:
            kept = pinned.get(f"{device.index}-{hook}")
            if kept and _links_at(device.index, hook).get(kept.id) == ours[hook]:
                continue
            pin = self._pin(device.index, hook)
            with bpf.opened(pin) as link:
                program = program_at(link or held.get(pin), device.index, hook)
            if link is None:
                yield Drift(Part.PIN, f"device {device.name}", f"has no pin {pin}")
            if text := fault(hook, program, ours):
                yield Drift(Part.DEVICE, f"device {device.name}", text)

    def pins(self, index: int, hooks: Collection[str] = tuple(TCX_HOOKS)) -> list[Path]:
        """Return the pins of our links at these hooks of a device."""
        return [self._pin(index, hook) for hook in hooks]

    def recorded(self, hooks: Collection[str] = tuple(TCX_HOOKS)) -> set[int]:
        """Return the devices, by ifindex, that have a pin of one of the hooks."""
        pins = self.folder.iterdir() if self.folder.is_dir() else ()
        parts = [pin.name.partition("-") for pin in pins]
        return indexes(number for number, _, hook in parts if hook in hooks)

    def _pin(self, index: int, hook: str) -> Path:
        return self.folder / f"{index}-{hook}"

    def _update_link(self, pin: Path, index: int, program: Program) -> bool:
        """Update the pinned link; return False if it is not attached to the device."""
        with bpf.opened(pin) as link:
            if link is None or not program_at(link, index, program.name):
                return False
            return cgroup_links.update_link(link, program)


def indexes(texts: Iterable[str]) -> set[int]:
    """Return the numbers among the texts that can be an ifindex, which is a C int."""
    return {int(text) for text in texts if text.isdecimal() and int(text) < 1 << 31}


def detach(pin: Path) -> None:
    """Detach a link at once and unpin it; unpinning alone would detach it some time later.

    A link whose device or cgroup was removed is already detached. A directory is not a link.
    """
    if pin.is_dir():
        return
    with suppress(KernelError), bpf.opened(pin) as link:
        if link is not None:
            bpf.link_detach(link)
    pin.unlink(missing_ok=True)


def fault(hook: str, program: int, ours: Mapping[str, int]) -> str:
    """Return the fault of the program at a device's hook, or "".

    ``program`` is 0 if none of ours is there.
    """
    if not program:
        return f"has no program of the agent at {hook}"
    if ours and program != ours.get(hook):
        return f"runs program #{program} at {hook}, which is not the agent's"
    return ""


def program_at(link: int | None, index: int, hook: str) -> int:
    """Return the link's program; 0 if there is no link, or it is not at this hook of the device."""
    if link is None:
        return 0
    return _links_at(index, hook).get(bpf.info(link, "link_info").id, 0)


def runs_before(link: int, other: int | None, index: int) -> bool:
    """Whether the link is at ingress of the device, and the other one, if it is, after it."""
    order = list(_links_at(index, "ingress"))
    first, second = (bpf.info(it, "link_info").id if it else 0 for it in (link, other))
    return first in order and second not in order[: order.index(first)]


def _links_at(index: int, hook: str) -> dict[int, int]:
    """Return link -> program at the device's hook; empty if no device has the index."""
    try:
        return bpf.query_links(index, TCX_HOOKS[hook])
    except KernelError as error:
        if error.errno in (errno.ENODEV, errno.EINVAL):
            return {}
        raise
