# SPDX-License-Identifier: Apache-2.0
"""Attaches programs to a device by tcx links (kernel 6.6): pinned, and replaced atomically.

    <folder>/<ifindex>-ingress, <folder>/<ifindex>-egress

A link stays with a device that moves to another network namespace, and outlives a device that is
deleted. Therefore a pin counts only if the device with its ifindex lists the link. Our programs
are attached first: they return TC_ACT_UNSPEC, so all programs after them see every packet, whereas
no program runs after one that returns TC_ACT_OK.
"""

import errno
import os
from pathlib import Path

from ebpflb.datapath import kernel
from ebpflb.datapath.programs.loader import SCHED_CLS, Program
from ebpflb.errors import KernelError

POINTS = {"ingress": 46, "egress": 47}  # BPF_TCX_INGRESS, BPF_TCX_EGRESS
BEFORE = 8  # BPF_F_BEFORE without a reference: at the head
_NO_DEVICE = 2**31 - 1
_PASS = bytes.fromhex("b7000000ffffffff9500000000000000")  # return TC_ACT_UNSPEC


def works() -> bool:
    """Whether the kernel has tcx: if it has, attaching fails only because there is no device."""
    program = kernel.prog_load(name="probe", kind=SCHED_CLS, attach=0, code=_PASS, log=None)
    try:
        kernel.link_create(program, _NO_DEVICE, POINTS["ingress"])
    except KernelError as error:
        return error.errno == errno.ENODEV
    finally:
        os.close(program)
    return True


class Tcx:
    """The links that are pinned in one folder."""

    name = "tcx"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def attach(self, index: int, programs: list[Program]) -> None:
        """Attaches the programs to a device. Raises KernelError, ENODEV if the device is gone."""
        for program in programs:
            pin = self._pin(index, program.name)
            if self._replaced(pin, index, program):
                continue
            pin.unlink(missing_ok=True)
            link = kernel.link_create(program.fd, index, POINTS[program.name], BEFORE)
            try:
                kernel.pin(link, str(pin))
            finally:
                os.close(link)

    def held(self) -> set[int]:
        """The devices, by ifindex, that have our links at ingress and egress."""
        return {index for index in self.known() if len(self.programs(index)) == len(POINTS)}

    present = held  # this is cheap

    def prune(self, wanted: set[int]) -> None:
        """Removes our links from all other devices, and those of removed devices."""
        for index in self.known() - wanted:
            for end in POINTS:
                self._pin(index, end).unlink(missing_ok=True)

    def programs(self, index: int) -> dict[str, int]:
        """The ids of our programs at a device: by "ingress" and "egress"."""
        found = {}
        for end in POINTS:
            link = kernel.get(str(self._pin(index, end)))
            if link is not None:
                try:
                    if _sits_on(link, index, end):
                        found[end] = int(kernel.info(link, "tcx_info").program)
                finally:
                    os.close(link)
        return found

    def known(self) -> set[int]:
        """The devices, by ifindex, that have a pin."""
        pins = self.folder.iterdir() if self.folder.is_dir() else ()
        parts = [pin.name.partition("-") for pin in pins]
        return {int(number) for number, _, end in parts if end in POINTS}

    def _pin(self, index: int, end: str) -> Path:
        return self.folder / f"{index}-{end}"

    def _replaced(self, pin: Path, index: int, program: Program) -> bool:
        """Updates the pinned link. False if it is not attached to the device."""
        link = kernel.get(str(pin))
        if link is None:
            return False
        try:
            if not _sits_on(link, index, program.name):
                return False
            kernel.link_update(link, program.fd)
        except KernelError as error:
            if error.errno == errno.ENOLINK:
                return False
            raise
        finally:
            os.close(link)
        return True


def _sits_on(link: int, index: int, end: str) -> bool:
    """False also if no device has the index."""
    try:
        return kernel.info(link, "tcx_info").id in kernel.query_links(index, POINTS[end])
    except KernelError as error:
        if error.errno in (errno.ENODEV, errno.EINVAL):
            return False
        raise
