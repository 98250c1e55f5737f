# SPDX-License-Identifier: Apache-2.0
"""The programs of one agent: their run time by the kernel's own statistics; off, and on again.

Hooks       those at its cgroup
EmptyHooks  programs that do nothing, at a cgroup of their own
Packets     the two that it has at devices

The kernel adds up, for each program, how often and how long it ran; the figure per call includes
one reading of its clock and the call, 20 to 60 ns: what EmptyHooks show.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from ebpflb.errors import NodeError
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.programs import loader
from ebpflb.kernel.programs.loader import PACKET_SECTIONS, SECTIONS, Program
from ebpflb.lab.agents import wait_until

_ALLOW = bytes.fromhex("b7000000010000009500000000000000")  # return 1


class Runs(NamedTuple):
    """All runs of one program so far."""

    times: int
    nanoseconds: int


class Counted:
    """Programs, and their runs."""

    def __init__(self, programs: list[Program]) -> None:
        self.programs = programs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.programs:
            os.close(program.fd)

    def during(self, work: Callable[[], object]) -> dict[str, Runs]:
        """Return the runs of each program during the work."""
        before = self._runs()
        work()
        after = self._runs()
        return {
            name: Runs(after[name].times - runs.times, after[name].nanoseconds - runs.nanoseconds)
            for name, runs in before.items()
            if after[name].times > runs.times
        }

    def per_call(self, work: Callable[[], object]) -> dict[str, float]:
        """Return nanoseconds per call, of each program that ran during the work."""
        return {name: runs.nanoseconds / runs.times for name, runs in self.during(work).items()}

    def _runs(self) -> dict[str, Runs]:
        infos = {program.name: bpf.info(program.fd, "prog_info") for program in self.programs}
        return {name: Runs(info.run_count, info.run_time) for name, info in infos.items()}


class Packets(Counted):
    """The programs for devices with a link header; known by their tcx links (kernel 6.6)."""

    def __init__(self, state: StateDir) -> None:
        ends = {pin.name.partition("-")[2]: pin for pin in state.devices_directory.iterdir()}
        super().__init__([at_device(name, pin) for name, pin in sorted(ends.items())])


def at_device(name: str, pin: Path) -> Program:
    """Return the program of a pin. Raises NodeError if it is not a tcx link."""
    link = bpf.get(str(pin)) if pin.is_file() else None
    if link is None:
        raise NodeError(f"{pin} is not a tcx link: the statistics need Linux 6.6")
    try:
        number = int(bpf.info(link, "tcx_info").program)
    finally:
        os.close(link)
    return Program(name, bpf.prog_by_id(number), PACKET_SECTIONS[f"tc/{name}"].attach_type)


class Hooks(Counted):
    """An agent's programs at its cgroup; with ``many``, any of its services may be used."""

    def __init__(self, state: StateDir, cgroup: Path, *, many: bool = False) -> None:
        self.state, self.cgroup, self.many = state, cgroup, many
        super().__init__(
            [
                Program(name, bpf.prog_by_id(number), SECTIONS[f"cgroup/{name}"].attach_type)
                for name, number in cgroup_links.attached(state).items()
            ]
        )

    @contextmanager
    def off(self) -> Iterator[None]:
        """Nothing attached. The agent holds the links, so they do not end with their pins; it is to
        be one that does not put them back (--audit=report).
        """
        for pin in list(self.state.links()):
            link = bpf.get(str(pin))
            assert link is not None, pin
            bpf.link_detach(link)
            os.close(link)
            pin.unlink()
        wait_until(f"{self.cgroup} has no programs", lambda: not self._attached())
        try:
            yield
        finally:
            cgroup_links.attach(self.state, self.cgroup, self.programs)

    def _attached(self) -> list[int]:
        target = os.open(self.cgroup, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return [i for p in self.programs for i in bpf.query(target, p.attach_type)]
        finally:
            os.close(target)


class EmptyHooks(Counted):
    """A program that only returns, at each hook of a cgroup."""

    def __init__(self, cgroup: Path) -> None:
        self.cgroup = cgroup
        hooks = {section.partition("/")[2]: hook for section, hook in SECTIONS.items()}
        super().__init__(
            [
                Program(name, loader.load_one(name, hook, _ALLOW), hook.attach_type)
                for name, hook in hooks.items()
            ]
        )
        with bpf.closing(os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)) as at:
            self._links = [bpf.link_create(p.fd, at, p.attach_type) for p in self.programs]

    def __exit__(self, *_: object) -> None:
        for link in self._links:
            os.close(link)
        super().__exit__()


_ENABLE_STATS = 32  # of bpf(2), Linux 5.8


@contextmanager
def statistics() -> Iterator[None]:
    """Have the kernel measure every run; this takes time, so latencies are measured without."""
    attr = bpf.ffi.new("struct by_id *")
    fd = bpf.bpf(_ENABLE_STATS, "enabling run-time statistics", attr)
    try:
        yield
    finally:
        os.close(fd)
