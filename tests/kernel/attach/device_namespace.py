# SPDX-License-Identifier: Apache-2.0
"""Devices in a network namespace of the test's own, and the programs that are attached to them."""

import errno
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pyroute2 import netns

from ebpflb.errors import KernelError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import tcx
from ebpflb.kernel.attach.device_programs import DevicePrograms
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node import device_watch
from ebpflb.kernel.programs.loader import SCHED_CLS, Program
from ebpflb.lab.netns import ip as run_ip
from ebpflb.model.devices import Devices, served

GO_ON, DROP = -1, 2  # TC_ACT_UNSPEC, TC_ACT_SHOT
HOOKS = ("ingress", "egress")
ALL = {"v0", "w0", "br0", "tun0"}
NONE: dict[str, list[int]] = {"ingress": [], "egress": []}

has_tcx = tcx.works  # some tests pretend that it has not

Agent = Callable[..., DevicePrograms]
At = Callable[[str], dict[str, list[int]]]


class Namespace:
    """A namespace that the calling thread is in. ``run`` takes a command line."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, words: str) -> str:
        enter = ["nsenter", f"--net=/run/netns/{self.name}", "--"]
        done = subprocess.run([*enter, *words.split()], capture_output=True, text=True, check=True)
        return done.stdout

    def served(self, *patterns: str) -> Devices:
        return served(device_watch.list_devices().devices, patterns)

    def index(self, name: str) -> int:
        return next(d.index for d in device_watch.list_devices().devices if d.name == name)

    def tcx(self, name: str) -> dict[str, list[int]]:
        """Return the ids of the programs that tcx runs in each direction, in order.

        The result is empty if the kernel has no tcx.
        """
        index = self.index(name)
        try:
            return {end: bpf.query(index, tcx.TCX_HOOKS[end]) for end in HOOKS}
        except KernelError as error:
            if error.errno != errno.EINVAL:
                raise
            return {}

    def filters(self, name: str) -> dict[str, list[int]]:
        """Return the ids of the programs that clsact runs at each end, in order."""
        shown = {end: self.run(f"tc filter show dev {name} {end}") for end in HOOKS}
        return {
            end: [int(i) for i in re.findall(r" id (\d+)", text)] for end, text in shown.items()
        }

    def has_clsact(self, name: str) -> bool:
        return "clsact" in self.run(f"tc qdisc show dev {name}")


@contextmanager
def entered(name: str) -> Iterator[Namespace]:
    """Enter a new namespace with the veth v0 and w0, the bridge br0 with port v0, and tun0."""
    run_ip("netns", "add", name)
    netns.pushns(name)
    made = Namespace(name)
    try:
        for words in (
            "link add v0 type veth peer name w0",
            "link add br0 type bridge",
            "link set v0 master br0",
            "tuntap add tun0 mode tun",
        ):
            made.run(f"ip {words}")
        yield made
    finally:
        netns.popns()
        netns.remove(name)


def program(name: str, verdict: int = GO_ON) -> Program:
    """Load a program that returns the verdict for every packet."""
    code = bytes([0xB7, 0, 0, 0]) + verdict.to_bytes(4, "little", signed=True)
    code += bytes([0x95, *bytes(7)])
    return Program(
        name,
        bpf.prog_load(name=name, program_type=SCHED_CLS, attach_type=0, code=code, log=None),
        0,
    )


def pair(verdict: int = GO_ON) -> list[Program]:
    return [program(end, verdict) for end in HOOKS]


def ids(programs: list[Program]) -> dict[str, list[int]]:
    return {p.name: [number(p)] for p in programs}


def number(one: Program) -> int:
    return int(bpf.info(one.fd, "prog_info").id)


def close(programs: list[Program]) -> None:
    for one in programs:
        os.close(one.fd)


def with_clsact(
    ns: Namespace, device: str, one: Program, *, priority: int, handle: int = 1
) -> None:
    """Attach another agent's filter at ingress, by tc."""
    path = f"/sys/fs/bpf/{ns.name}-other_program"
    bpf.pin(one.fd, path)
    try:
        if not ns.has_clsact(device):
            ns.run(f"tc qdisc add dev {device} clsact")
        place = f"dev {device} ingress prio {priority} handle {handle}"
        ns.run(f"tc filter add {place} bpf object-pinned {path} direct-action")
    finally:
        os.unlink(path)


def home_of(made: DevicePrograms) -> StateDir:
    return StateDir(made.attacher.folder.parent)
