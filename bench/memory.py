# SPDX-License-Identifier: Apache-2.0
"""The memory that an agent takes, by engine, Services and endpoints: for a memory limit.

    sudo .venv/bin/python -m bench.memory [--services N] [--changes C]

An agent as in a pod, beside 100, 1,000, ... N Services with one endpoint each, and then with 10
each. It starts for the first time, restarts, and follows C changes of endpoints. "RSS" is what the
process has at the end, "peak" the most that it had since the restart (VmHWM), "maps" what the
kernel counts for the maps (memlock in fdinfo), and "kernel" all that the kernel has allocated for
the agent's cgroup: maps, programs, elements of the nft table.
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from bench.api_lab import ApiNode, serve_pods
from bench.connect_lab import MB
from bench.report import Line, Row
from bench.result import Result, run_bench
from bench.temporary_lab import print_step, temporary_lab
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab.hosts import Lab
from ebpflb.model.packet_path import Engine
from tests.kit.memory_limit import MemoryLimit, memory_limit

PREFIX = "ebpflb-memory"
RATE = 200.0  # changes a second
PER_CPU, MEASURED_CPUS = 4.2, 2  # MB of the maps for each possible CPU; docs/scale.md
RSS, PEAK, MAPS, KERNEL = "RSS", "peak", "maps", "kernel"
EACH = {1: "one endpoint each", 10: "10 endpoints each"}


def main() -> None:
    run_bench(__doc__, _measured, services=10_000, changes=500)


def _measured(wanted: argparse.Namespace) -> Iterator[Line]:
    sizes = [size for size in (100, 1000, 10_000) if size <= wanted.services]
    for engine in Engine:
        for endpoints, each in EACH.items():
            yield f"{engine}, {each}"
            for services in sizes:
                print_step(f"measuring {services} Services of {endpoints}, {engine}")
                yield from measure(engine, services, endpoints, wanted.changes)


def measure(engine: str, services: int, endpoints: int, changes: int) -> Iterator[Row]:
    """Yield the rows of one agent in MB."""
    with memory_limit(PREFIX) as group, temporary_lab(PREFIX) as (lab, folder, stack):
        node = started(lab, folder, stack, [[services, endpoints]], engine, group)
        agent = node.agent
        agent.warm_restart()
        node.api.do("change", changes, RATE)
        node.wait_for_quiet()
        process = agent.agent.process
        assert process
        sizes = (
            agent.memory()["Rss"],
            peak(process.pid),
            map_memory(agent.state),
            kernel_memory(group),
        )
        for what, size in zip((RSS, PEAK, MAPS, KERNEL), sizes, strict=True):
            yield Row(what, size, "MB", at=services, axis="Services")


def started(
    lab: Lab, folder: Path, stack: ExitStack, sizes: list[list[int]], engine: str,
    group: MemoryLimit,
) -> ApiNode:  # fmt: skip
    """Start an agent whose memory counts in this group."""
    host = lab.node("node", 1)
    node = ApiNode(lab, host, folder, stack, serve_pods(lab, host), sizes)
    node.listen()
    enter = f'echo $$ > {group.folder}/cgroup.procs && exec "$@"'
    node.agent.agent.under = ("sh", "-c", enter, "sh")
    node.agent.agent.options += (f"--packet-path={engine}",)
    node.agent.start()
    node.wait_for_quiet()
    return node


class Sum(NamedTuple):
    """What one agent needs at once: the peak of the process, and the kernel's memory, in MB."""

    engine: str
    services: int
    endpoints: int
    size: float


def sums(found: Result) -> Iterator[Sum]:
    for engine in Engine:
        for endpoints, each in EACH.items():
            rows = found.rows(f"{engine}, {each}")
            for services in dict.fromkeys(int(row.at or 0) for row in rows):
                sizes = {row.what: row.value for row in rows if row.at == services}
                size = sizes[PEAK] + sizes[KERNEL]
                yield Sum(engine, services, services * endpoints, size)


class Formula(NamedTuple):
    """MB, in addition to those per possible CPU; kB per Service, and per endpoint."""

    base: int
    service: float
    endpoint: float

    def size(self, services: int, endpoints: int, cpus: int) -> float:
        """Return MB."""
        growing = services * self.service + endpoints * self.endpoint
        return self.base + PER_CPU * cpus + growing / 1e3

    def limit(self, services: int, endpoints: int, cpus: int) -> str:
        """Return a memory limit with a quarter more, in multiples of 64 MiB."""
        size = 1.25 * MB * self.size(services, endpoints, cpus)
        return f"{64 * math.ceil(size / (64 << 20))}Mi"

    def __str__(self) -> str:
        return (
            f"{self.base} MB, {PER_CPU} MB for each possible CPU up to the 32nd, "
            f"{self.service} kB for each Service and {self.endpoint} kB for each endpoint"
        )


def fit(found: list[Sum]) -> Formula:
    """Least squares of the relative errors, with the engine that takes more; rounded up so that no
    measured sum is above.
    """
    import numpy

    larger = [it for it in found if it.engine == Engine.NETFILTER]
    ways = [[1 / it.size, it.services / it.size, it.endpoints / it.size] for it in larger]
    fitted = numpy.linalg.lstsq(numpy.array(ways), numpy.ones(len(ways)), rcond=None)[0]
    growing = Formula(0, *(_up(1e3 * each) for each in fitted[1:]))
    rest = (it.size - growing.size(it.services, it.endpoints, MEASURED_CPUS) for it in found)
    return growing._replace(base=math.ceil(max(rest)))


def _up(size: float) -> float:
    return math.ceil(10 * size) / 10


def peak(pid: int) -> float:
    """Return the process's maximum in MB: proc(5), VmHWM."""
    return _number(Path(f"/proc/{pid}/status"), "VmHWM:") * 1024 / MB


def map_memory(state: StateDir) -> float:
    """Return what the kernel counts for all maps, in MB."""
    maps = state.read_maps()
    try:
        return sum(_memlock(each.fd) for each in maps.values()) / MB
    finally:
        for each in maps.values():
            each.close()


def _memlock(fd: int) -> int:
    return _number(Path(f"/proc/self/fdinfo/{fd}"), "memlock:")


def _number(path: Path, name: str) -> int:
    return int(path.read_text().partition(name)[2].split()[0])


def kernel_memory(group: MemoryLimit) -> float:
    """Return what the kernel has allocated for a memory cgroup's processes, in MB."""
    of_v1 = group.folder / "memory.kmem.usage_in_bytes"
    if of_v1.exists():
        return int(of_v1.read_text()) / MB
    return _number(group.folder / "memory.stat", "kernel ") / MB


if __name__ == "__main__":
    main()
