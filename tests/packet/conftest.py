# SPDX-License-Identifier: Apache-2.0
"""One set of maps and programs, emptied for each test.

Each file has devices in its own namespace. The verifier takes longer to load the programs than most
test files take to run.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ebpflb.kernel.maps import bpf_map, layout, state_dir
from ebpflb.kernel.maps.bpf_map import CPU_ARRAYS, Map
from ebpflb.kernel.maps.layout import MapSpec
from ebpflb.kernel.programs import compiler, loader
from ebpflb.kernel.programs.compiler import Compiled
from tests.kit import once
from tests.packet.frames import at
from tests.packet.network import network_of_our_own
from tests.packet.node import PacketNode
from tests.packet.places import V4, V6, Places

SCHED_CLS = loader.HookType(3, 0)
ENTRIES = {CPU_ARRAYS: 1 << 20}  # at most, of maps of a kind: those for all CPUs stay as they are
# One cell of memory each, not one a CPU: read before and after every packet, without a call.
VERDICTS = layout.MAPS["verdicts"]._replace(kind="ARRAY", flags=("MMAPABLE",))
# The programs name the sizes of these; two are emptied through memory.
EMPTIED = ("recent_choices", "half_open")
MAPPED = {each: layout.MAPS[each]._replace(flags=("MMAPABLE",)) for each in EMPTIED}
SPECS = {"verdicts": VERDICTS, "no_frontends": layout.MAPS["no_frontends"], **MAPPED}

Loaded = tuple[dict[str, Map], dict[str, int]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() != 0:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="bpf(2) is root's"))


@contextmanager
def loaded(compiled: Compiled, **specs: MapSpec) -> Iterator[Loaded]:
    """Load unpinned maps by name, with some changed or added; return them and the hooks'
    descriptors.
    """
    with ExitStack() as opened:
        tables: dict[str, Map] = {}
        for name, usual in (layout.MAPS | specs).items():
            small = usual.at_most(ENTRIES.get(usual.kind, 4096))
            spec = (SPECS | specs).get(name, small)
            tables[name] = bpf_map.open_map(spec, state_dir.create_map(spec))
            opened.callback(tables[name].close)
        fds = {compiler.MAP_NUMBERS[name]: table.fd for name, table in tables.items()}
        hooks: dict[str, int] = {}
        for name, code in compiled.programs.items():
            hooks[name] = loader.load_one(name, SCHED_CLS, loader.relocate(code, fds))
            opened.callback(os.close, hooks[name])
        yield tables, hooks


@pytest.fixture(scope="session")
def compiled(shared: Path, cache: Path) -> Compiled:
    with once.alone(shared):
        return compiler.compile_source("hooks/packet.c", cache=cache)


@pytest.fixture(scope="module")
def devices() -> Iterator[dict[str, int]]:
    with network_of_our_own() as found:
        yield found


@pytest.fixture(scope="session")
def datapath(compiled: Compiled) -> Iterator[Loaded]:
    with loaded(compiled) as found:
        yield found


@pytest.fixture
def node(datapath: Loaded, devices: dict[str, int]) -> PacketNode:
    """Return a node without services."""
    return PacketNode(*datapath, devices)


@pytest.fixture(params=[V4, V6], ids=["v4", "v6"])
def places(request: pytest.FixtureRequest) -> Places:
    found: Places = request.param
    return found


@pytest.fixture(params=["tcp", "udp", "sctp"])
def protocol(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(params=["pod", "client"])
def client(request: pytest.FixtureRequest, places: Places) -> str:
    """Return a pod, which keeps its address, or a client outside, which is masqueraded."""
    return at(getattr(places, request.param), 50123)


@pytest.fixture
def kind(client: str, places: Places) -> str:
    """Return the kind of frontend that this client uses."""
    return "cluster" if client == at(places.pod, 50123) else "nodeport"
