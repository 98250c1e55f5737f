# SPDX-License-Identifier: Apache-2.0
"""For all tests: hypothesis' profile, markers by folder, and how workers divide the tests.

Each test has one of the markers pure, kernel and cluster; those that take long are slow as well
(setup.cfg says what they mean). ``pytest -n N`` runs the tests in N processes, by groups (see
tests/kit/scheduling.py), those that take long first.
"""

import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ebpflb.datapath import datapath
from ebpflb.datapath.programs.compiler import compile_source
from ebpflb.options import Paths
from tests.kit import once
from tests.load import scaled

settings.register_profile(
    "patient",
    deadline=None,
    max_examples=scaled(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")
# SIGTERM is for all processes of a run what SIGINT is: fixtures clean up.
signal.signal(signal.SIGTERM, signal.default_int_handler)

ROOT = Path(__file__).parents[1]
# By folder or file; the longest path that fits counts.
KINDS = {
    "tests/": "pure",
    "tests/agent/test_api.py": "cluster",
    "tests/agent/test_engine_choice.py": "kernel",
    "tests/agent/test_restart.py": "cluster",
    "tests/cli/": "kernel",
    "tests/cli/test_config_process.py": "cluster",
    "tests/cli/test_demo.py": "cluster",
    "tests/cli/test_flows.py": "cluster",
    "tests/cli/test_manifests.py": "cluster",
    "tests/cli/test_maps.py": "cluster",
    "tests/cli/test_run_process.py": "cluster",
    "tests/cli/test_status.py": "cluster",
    "tests/datapath/": "kernel",
    "tests/deploy/test_container.py": "kernel",
    "tests/deploy/test_rights.py": "cluster",
    "tests/deploy/test_wheel.py": "kernel",
    "tests/diagnose/": "kernel",
    "tests/kernels/inside/": "kernel",
    "tests/network/": "cluster",
    "tests/node/": "kernel",
    "tests/packet/": "kernel",
    "tests/serve/": "kernel",
    "tests/stale_udp/": "kernel",
}
# Files that take more than ten seconds on their own, or five of them without root.
SLOW = {
    "tests/agent/test_restart.py",
    "tests/cli/test_config_process.py",
    "tests/cli/test_demo.py",
    "tests/cli/test_flows.py",
    "tests/deploy/test_chart.py",
    "tests/deploy/test_manifests.py",
    "tests/deploy/test_rights.py",
    "tests/kernels/inside/test_attach.py",
    "tests/network/test_bridged_pods.py",
    "tests/network/test_conntrack_operation.py",
    "tests/network/test_conntrack_table.py",
    "tests/network/test_e2e_nodes.py",
    "tests/network/test_e2e_ports.py",
    "tests/network/test_e2e_services.py",
    "tests/network/test_floods.py",
    "tests/network/test_lifecycle.py",
    "tests/network/test_masquerade_matrix.py",
    "tests/network/test_packets_flows.py",
    "tests/network/test_packets_options.py",
    "tests/network/test_packets_refusal.py",
    "tests/network/test_packets_setups.py",
    "tests/network/test_socket_translation.py",
    "tests/network/test_survival.py",
    "tests/network/test_takeover.py",
}


def kind(path: Path) -> str:
    """The marker of the tests in this file."""
    file = str(path.relative_to(ROOT))
    return KINDS[max(filter(file.startswith, KINDS), key=len)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What only root can import is not read where only pure tests are asked for."""
    only_pure = config.option.markexpr.startswith("pure")
    is_test = collection_path.name.startswith("test_")
    return True if only_pure and is_test and kind(collection_path) != "pure" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(kind(item.path))
        if str(item.path.relative_to(ROOT)) in SLOW:
            item.add_marker("slow")
        if item.get_closest_marker("cluster") and isinstance(item, pytest.Function):
            item.fixturenames.insert(0, agents_bytecode.__name__)
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[bool, int]:
    """Clusters first, the slow ones before the others: at the end only short tests are left."""
    kinds = ["cluster", "kernel", "pure"]
    kind = next(at for at, name in enumerate(kinds) if item.get_closest_marker(name))
    return item.get_closest_marker("slow") is None, kind


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.kit.scheduling import Scheduling  # imports xdist, which other runs do not need

    config.option.loadscopereorder = False  # the order above, not by the number of tests
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the whole run."""
    return once.shared_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def agents_bytecode(shared: Path) -> None:
    """The agents' cache has what they need: several at once would compile the same."""
    packets = datapath.PACKET_SOURCE, datapath.packet_flags()
    with once.alone(shared):
        compile_source(datapath.SOCKET_SOURCE, datapath.socket_flags(), cache=Paths.cache)
        compile_source(*packets, cache=Paths.cache)
        compile_source(packets[0], (*packets[1], "-DNO_LINK_HEADER"), cache=Paths.cache)
