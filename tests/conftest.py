# SPDX-License-Identifier: Apache-2.0
"""For all tests: hypothesis' profile, markers by folder, and how workers divide the tests.

Each test has one of the markers pure, kernel and cluster; those that take long are slow as well
(setup.cfg says what they mean). ``pytest -n N`` runs the tests in N processes, by groups (see
tests/kit/scheduling.py), those that take long first.
"""

import gc
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ebpflb.kernel import datapath
from ebpflb.kernel.programs.compiler import compile_source
from ebpflb.model.events import PartStatus
from ebpflb.options import Paths
from ebpflb.stopping import parts

pytest.register_assert_rewrite("tests.kit")  # a failure there shows values, too

from tests.kit import once  # noqa: E402
from tests.kit.failing import Failing  # noqa: E402
from tests.load import scaled  # noqa: E402

settings.register_profile(
    "patient",
    deadline=None,
    max_examples=scaled(100),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")
# SIGTERM is for all processes of a run what SIGINT is: fixtures clean up.
signal.signal(signal.SIGTERM, signal.default_int_handler)
# While thousands of tests are collected nothing is garbage: to look for it takes a second.
gc.disable()

ROOT = Path(__file__).parents[1]
# By folder or file; the longest path that fits counts.
KINDS = {
    "tests/": "pure",
    "tests/agent/test_api.py": "cluster",
    "tests/agent/test_netfilter_sync.py": "kernel",
    "tests/agent/test_restart.py": "cluster",
    "tests/bench/test_growth.py": "cluster",
    "tests/bench/test_slice_way.py": "cluster",
    "tests/cli/": "kernel",
    "tests/cli/test_config_process.py": "cluster",
    "tests/cli/test_demo.py": "cluster",
    "tests/cli/test_doctor.py": "cluster",
    "tests/cli/test_doctor_canary.py": "cluster",
    "tests/cli/test_doctor_canary_options.py": "cluster",
    "tests/cli/test_flows.py": "cluster",
    "tests/cli/test_history.py": "cluster",
    "tests/cli/test_maps.py": "cluster",
    "tests/cli/test_place.py": "cluster",
    "tests/cli/test_run_process.py": "cluster",
    "tests/cli/test_services.py": "cluster",
    "tests/cli/test_status.py": "cluster",
    "tests/conformance/": "cluster",
    "tests/kernel/": "kernel",
    "tests/deploy/test_container.py": "kernel",
    "tests/deploy/test_rights.py": "cluster",
    "tests/deploy/test_wheel.py": "kernel",
    "tests/tools/": "kernel",
    "tests/tools/firewall/": "pure",
    "tests/history/": "kernel",
    "tests/kernels/inside/": "kernel",
    "tests/network/": "cluster",
    "tests/kernel/node/": "kernel",
    "tests/native/test_mutations.py": "kernel",
    "tests/packet/": "kernel",
    "tests/serve/": "kernel",
    "tests/soak/": "cluster",
    "tests/agent/stale_udp/": "kernel",
    "tests/test_child.py": "kernel",
    "tests/page/test_browser.py": "cluster",
    "tests/page/test_layout.py": "cluster",
    "tests/page/test_chart_rights.py": "cluster",
    "tests/page/test_server.py": "kernel",
}
# Files that take more than ten seconds on their own, or five of them without root.
SLOW = {
    "tests/agent/test_restart.py",
    "tests/bench/test_growth.py",
    "tests/cli/test_config_process.py",
    "tests/cli/test_demo.py",
    "tests/cli/test_flows.py",
    "tests/kernel/programs/test_recording.py",
    "tests/kernel/recording/test_sockets.py",
    "tests/deploy/test_chart.py",
    "tests/deploy/test_manifests.py",
    "tests/deploy/test_rights.py",
    "tests/docs/test_guide.py",
    "tests/tools/test_damaged.py",
    "tests/kernels/inside/test_attach.py",
    "tests/native/test_mutations.py",
    "tests/network/test_api_servers.py",
    "tests/network/test_audit.py",
    "tests/network/test_audit_maps.py",
    "tests/network/test_auto_packet_path.py",
    "tests/network/test_e2e_services.py",
    "tests/network/test_explain.py",
    "tests/network/test_firewall_check.py",
    "tests/network/test_firewalls.py",
    "tests/network/test_killed_amid_changes.py",
    "tests/network/test_layout_upgrade.py",
    "tests/network/test_lifecycle.py",
    "tests/network/test_many_devices.py",
    "tests/network/test_monitor.py",
    "tests/network/test_netfilter_floods.py",
    "tests/network/test_netfilter_operation.py",
    "tests/network/test_netfilter_parity.py",
    "tests/network/test_packets_refusal.py",
    "tests/network/test_packets_setups.py",
    "tests/network/test_read_only.py",
    "tests/network/test_schedulers.py",
    "tests/network/test_socket_translation.py",
    "tests/network/test_survival.py",
    "tests/network/test_takeover.py",
    "tests/packet/test_explained.py",
    "tests/simulation/test_mutations.py",
    "tests/simulation/test_schedules.py",
    "tests/page/test_browser.py",
    "tests/page/test_layout.py",
    "tests/page/test_chart_rights.py",
}

# Files that `make test` leaves out, as it does each test with the marker extended: they are the
# dearest, most take more than four seconds of processor time with one set of parameters. Of what
# some test (takeovers, failed starts, canaries, monitor) nothing else there tests the whole.
EXTENDED = {
    "tests/cli/test_config_process.py",
    "tests/cli/test_doctor.py",
    "tests/cli/test_doctor_canary.py",
    "tests/cli/test_doctor_canary_options.py",
    "tests/cli/test_many_endpoints.py",
    "tests/native/test_mutations.py",
    "tests/network/test_audit_maps.py",
    "tests/network/test_auto_packet_path.py",
    "tests/network/test_explain.py",
    "tests/network/test_failed_start.py",
    "tests/network/test_killed_amid_changes.py",
    "tests/network/test_layout_upgrade.py",
    "tests/network/test_lifecycle.py",
    "tests/network/test_monitor.py",
    "tests/network/test_netfilter_floods.py",
    "tests/network/test_netfilter_operation.py",
    "tests/network/test_packets_devices.py",
    "tests/network/test_packets_setups.py",
    "tests/network/test_packets_table.py",
    "tests/network/test_policy_routes.py",
    "tests/network/test_single_peer_endpoint.py",
    "tests/network/test_socket_translation.py",
    "tests/network/test_some_services.py",
    "tests/network/test_survival.py",
    "tests/network/test_takeover.py",
    "tests/network/test_top.py",
    "tests/simulation/test_mutations.py",
    "tests/page/test_browser.py",
    "tests/page/test_layout.py",
}


def kind(path: Path) -> str:
    """The marker of the tests in this file."""
    file = str(path.relative_to(ROOT))
    return KINDS[max(filter(file.startswith, KINDS), key=len)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore modules that only root can import if only pure tests are requested, and those whose
    tests are all extended if none of these is: to collect them would take a third of the time.
    """
    chosen = config.option.markexpr
    if not collection_path.name.startswith("test_"):
        return None
    if chosen.startswith("pure") and kind(collection_path) != "pure":
        return True
    is_extended = str(collection_path.relative_to(ROOT)) in EXTENDED
    return True if chosen == "not extended" and is_extended else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(kind(item.path))
        file = str(item.path.relative_to(ROOT))
        for marker, files in {"slow": SLOW, "extended": EXTENDED}.items():
            if file in files:
                item.add_marker(marker)
        if item.get_closest_marker("cluster") and isinstance(item, pytest.Function):
            item.fixturenames.insert(0, agents_bytecode.__name__)
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> tuple[bool, int]:
    """Clusters first, the slow ones before the others: at the end only short tests are left."""
    kinds = ["cluster", "kernel", "pure"]
    kind = next(at for at, name in enumerate(kinds) if item.get_closest_marker(name))
    return item.get_closest_marker("slow") is None, kind


def pytest_collection_finish() -> None:
    """What is collected stays until the end: no search for garbage passes through it again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.kit.scheduling import Scheduling  # imports xdist, which other runs do not need

    config.option.loadscopereorder = False  # the order above, not by the number of tests
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def no_part_fails() -> Iterator[None]:
    """No part of an agent in this process fails unexpectedly, except where a test expects it."""
    failed = list[PartStatus]()
    parts.connect(failed.append, lambda: None, Path("/nowhere/record"))
    yield
    assert [each for each in failed if parts.is_failing(each.part)] == []


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Failing]:
    """What is reported of parts that fail, which the test expects."""
    made = Failing(tmp_path / "record")
    parts.connect(made.told.append, made.stopped.set, made.record)
    yield made
    parts.connect(lambda status: None, lambda: None, made.record)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the whole run."""
    return once.shared_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def cache(shared: Path) -> Path:
    """Return the directory where all test processes and their agents share compiled programs."""
    return shared / "bytecode" if os.geteuid() else Paths.cache


@pytest.fixture
def fresh_netns() -> Iterator[None]:
    """The test's thread is in an empty network namespace, which is removed with all in it."""
    from tests.kernel.node import nodes  # imports what only root can use

    with nodes.fresh(f"ebpflb-test-{os.getpid()}-fresh"):
        yield


@pytest.fixture(scope="module")
def started_anew() -> Iterator[None]:
    """A file's agents are processes that were started as operators start them, not forked."""
    from tests.kit.forked import ForkedAgent  # imports what only root can

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkedAgent, "anew", True)
        yield


@pytest.fixture(scope="session")
def agents_bytecode(shared: Path) -> None:
    """The agents' cache has what they need: several at once would compile the same."""
    variants = [
        (datapath.PACKET_SOURCE, (*datapath.packet_flags(), *bare))
        for bare in ((), ("-DNO_LINK_HEADER",))
    ]
    variants.append((datapath.SOCKET_SOURCE, datapath.socket_flags()))
    with once.alone(shared), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda variant: compile_source(*variant, cache=Paths.cache), variants))
