# SPDX-License-Identifier: Apache-2.0
"""What the history costs a change.

    sudo .venv/bin/python -m bench.history [--changes N]

A service of ten endpoints loses and gets one again; the plan is written to small maps of the
kernel, with and without a history, in turn.
"""

import argparse
import tempfile
import time
from ipaddress import IPv4Address
from pathlib import Path
from statistics import median

from bench.report import Lines, Row, row_of
from bench.result import run_bench
from ebpflb.history.recorder import History
from ebpflb.history.segments import WriteCause
from ebpflb.kernel.map_writer import MapWriter
from ebpflb.kernel.maps import bpf_map, creation, layout
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.options import Paths
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.desired import DesiredBackend, DesiredService
from ebpflb.plan.entries import BackendName, Frontend
from ebpflb.plan.planner import Planner

ENTRIES, ENDPOINTS, US = 4096, 10, 1e6
_NAME = PortName("default", "web", "http", Protocol.TCP, Family.IPV4)
_FRONTEND = {Frontend(IPv4Address("10.96.0.10"), 80, 6): frozenset({"endpoints"})}


def main() -> None:
    """``changes`` with, and as many without."""
    run_bench(__doc__, _measured, changes=2000)


def _measured(wanted: argparse.Namespace) -> Lines:
    """Microseconds a change."""
    spent = _spent(wanted.changes)
    plain, recorded = ([US * each for each in spent[it]] for it in (False, True))
    yield f"a change written to the maps: {wanted.changes} of each"
    yield row_of("without a history", plain, "us")
    yield row_of("with a history", recorded, "us")
    yield Row("with a history: more", median(recorded) - median(plain), "us")


def _spent(changes: int) -> dict[bool, list[float]]:
    """Seconds of each change, with and without a history."""
    small = [spec._replace(entries=min(spec.entries, ENTRIES)) for spec in layout.MAPS.values()]
    maps = {spec.name: bpf_map.open_map(spec, creation.create_map(spec)) for spec in small}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        history = History(Paths(Path("/bench"), Path(folder)), maps)
        history.start()
        recorded = {name: opened.wrote for name, opened in maps.items()}
        planner = Planner(Capacity(ENTRIES, ENTRIES, ENTRIES, ENTRIES, ENTRIES))
        writer = MapWriter(maps)
        spent: dict[bool, list[float]] = {False: [], True: []}
        for number in range(2 * changes):
            with_history = number // 2 % 2 == 1
            for name, opened in maps.items():
                opened.wrote = recorded[name] if with_history else bpf_map.unrecorded
            spent[with_history].append(_change(number, planner, writer, history, with_history))
        history.stop()
    return spent


def _change(
    number: int, planner: Planner, writer: MapWriter, history: History, with_history: bool
) -> float:
    backends = tuple(
        DesiredBackend(
            IPv4Address(f"10.1.0.{index}"),
            8080,
            frozenset({"cluster"}),
            BackendName("node-1", f"web-{index}"),
        )
        for index in range(1, ENDPOINTS + number % 2)
    )
    desired = DesiredService(_NAME, "", dict(_FRONTEND), 0, backends)
    plan = planner.plan_changes({_NAME: desired}, number * 10)
    begun = time.perf_counter()
    writer.apply(plan)
    if with_history:
        history.because(WriteCause("modified", "EndpointSlice", "default/web-abcde", str(number)))
        history.commit()
    spent = time.perf_counter() - begun
    planner.written(number * 10)
    return spent


if __name__ == "__main__":
    main()
