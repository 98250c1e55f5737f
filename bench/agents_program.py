# SPDX-License-Identifier: Apache-2.0
"""Agents without a kernel beside one API server, a program of its own.

    agents_program.py KUBECONFIG FOLDER

Each is the real agent of tests/simulation, with its maps in memory, but with the real source, inbox
and clock: it lists, watches, plans and writes as on a node. It audits nothing, has no sweeper, and
serves no port. For each line [N] on standard input, this process forks N more agents, so that none
has to import the modules again, and prints the process ids of all agents.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from ebpflb import files
from ebpflb.agent import loop
from ebpflb.agent.loop import Inbox
from ebpflb.cluster import api  # noqa: F401  # otherwise each agent imports it
from ebpflb.cluster.list_watch import ApiSource
from ebpflb.cluster.source import ServerOptions
from ebpflb.kernel.maps.layout import MAPS
from ebpflb.options import Paths
from ebpflb.serve.metrics import Metrics
from tests.simulation import agent, bpffs
from tests.simulation.agent import RUN, Life, simulated
from tests.simulation.build import Library
from tests.simulation.kernel import SimKernel
from tests.simulation.node import devices
from tests.simulation.places import NODE
from tests.simulation.translations import SimTable
from tests.simulation.workers import Workers

MOST_ENTRIES = 131_072  # of a map: enough for 1,000 Services; its memory is taken as it is used
SPECS = {
    name: spec._replace(entries=min(spec.entries, MOST_ENTRIES)) for name, spec in MAPS.items()
}
SPECS["no_frontends"] = MAPS["no_frontends"]  # programs compute its bits
STATE = Path("/sys/fs/bpf/simulation")  # as tests.simulation.bpffs names it
REPLACE = files.replace
USUAL = {"SYNC_PERIOD": 3600.0}  # not the simulation's: no audit


class Node:
    """The simulated surroundings of an agent."""

    def __init__(self, library: Library) -> None:
        self.kernel = SimKernel(library, lambda what, do, may_fail: do())
        self.table = SimTable(cast(Any, self))

    @property
    def now(self) -> float:
        return time.monotonic()


def paths(folder: Path, number: int) -> Paths:
    """Return an agent's files, such as its status."""
    own = folder / f"agent-{number}"
    return Paths(STATE, own / RUN, own)


def run_agent(library: Library, url: str, folder: Path) -> None:
    """Run an agent until the process is ended."""
    (folder / RUN).mkdir(parents=True)
    node, nobody = Node(library), SimpleNamespace(token=None)
    with simulated(node.kernel, cast(Any, None), cast(Any, nobody), node.table):
        inbox = Inbox()
        source = ApiSource(inbox.put, node_name=NODE, server_options=ServerOptions(master=url))
        inbox.put(devices(1))
        life = Life(
            *(bpffs.root(node.kernel), folder, inbox, Metrics(), time.monotonic, SPECS),
            lambda maps: idle_workers(maps, inbox),
            lambda drifts: None,
        )
        life.history.start()
        with ExitStack() as stack:
            stack.enter_context(patch.object(loop, "time", time))  # the simulation's does not sleep
            stack.enter_context(patch.object(files, "replace", REPLACE))  # of the status
            stack.enter_context(loop.startup())
            source.start()
            life.agent.run()


def idle_workers(maps: Any, inbox: Inbox) -> Workers:
    """Disable workers without work: no datagrams are sent, no Service resets connections."""

    def end(key: bytes) -> int:
        return 0

    return Workers(maps, cast(Any, None), end, time.monotonic)


def fork_agents(count: int, first: int, start: Callable[[int], None]) -> list[int]:
    """Return the process ids. Each child ends with its agent."""
    pids = []
    for number in range(first, first + count):
        if not (pid := os.fork()):
            try:
                start(number)
            finally:
                os._exit(1)
        pids.append(pid)
    return pids


def main() -> None:
    url, folder = sys.argv[1], Path(sys.argv[2])
    library, pids = Library(), list[int]()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        with ExitStack() as stack:
            for name, value in USUAL.items():
                stack.enter_context(patch.object(agent, name, value))
            pids += fork_agents(
                json.loads(line)[0],
                len(pids),
                lambda number: run_agent(library, url, paths(folder, number).cache),
            )
        print(json.dumps(pids), flush=True)


if __name__ == "__main__":
    main()
