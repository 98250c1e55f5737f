# SPDX-License-Identifier: Apache-2.0
"""The programs of one agent: their run time by the kernel's own statistics; off, and on again.

The kernel adds up, for each program, how often and how long it ran; the figure per call includes
one reading of its clock, some 20 ns.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ebpflb.datapath import compiler, kernel, links
from ebpflb.datapath.datapath import SOURCE
from ebpflb.datapath.programs import SECTIONS, Program
from ebpflb.datapath.state import State
from ebpflb.lab.agents import wait_until


class Runs(NamedTuple):
    """All runs of one program so far."""

    times: int
    nanoseconds: int


class Hooks:
    """What an agent has in force at its cgroup; with ``many``, of its services any may be asked."""

    def __init__(self, state: State, cgroup: Path, *, many: bool = False) -> None:
        self.state, self.cgroup, self.many = state, cgroup, many
        sections = compiler.sections(SOURCE)
        self.programs = [
            Program(name, kernel.prog_by_id(number), SECTIONS[sections[name]].point)
            for name, number in links.attached(state).items()
        ]

    def __enter__(self) -> "Hooks":
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.programs:
            os.close(program.fd)

    def per_call(self, work: Callable[[], object]) -> dict[str, float]:
        """Nanoseconds a call, for each program that ran during the work."""
        before = self._runs()
        work()
        after = self._runs()
        return {
            name: (after[name].nanoseconds - runs.nanoseconds) / (after[name].times - runs.times)
            for name, runs in before.items()
            if after[name].times > runs.times
        }

    @contextmanager
    def off(self) -> Iterator[None]:
        """Nothing attached; the agent, which does not look, is none the wiser."""
        for pin in self.state.links():
            pin.unlink()
        wait_until(f"{self.cgroup} has no programs", lambda: not self._attached())
        try:
            yield
        finally:
            links.attach(self.state, self.cgroup, self.programs)

    def _attached(self) -> list[int]:
        target = os.open(self.cgroup, os.O_RDONLY | os.O_DIRECTORY)
        try:
            return [i for p in self.programs for i in kernel.query(target, p.point)]
        finally:
            os.close(target)

    def _runs(self) -> dict[str, Runs]:
        infos = {program.name: kernel.info(program.fd, "prog_info") for program in self.programs}
        return {name: Runs(info.run_count, info.run_time) for name, info in infos.items()}


@contextmanager
def statistics() -> Iterator[None]:
    """The kernel keeps the time of every run meanwhile; it costs some, so not for latencies."""
    fd = kernel.enable_stats()
    try:
        yield
    finally:
        os.close(fd)
