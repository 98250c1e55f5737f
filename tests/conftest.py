# SPDX-License-Identifier: Apache-2.0
"""For all tests: hypothesis' profile, markers (markers.toml), and how workers divide the tests.

Each test has one of the markers pure, kernel and cluster; tests that take long are also slow
(setup.cfg explains the markers). ``pytest -n N`` runs the tests in N processes, by groups (see
tests/kit/scheduling.py), long tests first.
"""

import gc
import os
import signal
import tomllib
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
    "patient", deadline=None, max_examples=scaled(100), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")
# SIGTERM is for all processes of a run what SIGINT is: fixtures clean up.
signal.signal(signal.SIGTERM, signal.default_int_handler)
# While thousands of tests are collected nothing is garbage: to look for it takes a second.
gc.disable()

ROOT = Path(__file__).parents[1]
_MARKERS = tomllib.loads(Path(__file__).with_name("markers.toml").read_text())
KINDS: dict[str, str] = _MARKERS["kinds"]
SLOW, EXTENDED = frozenset(_MARKERS["slow"]), frozenset(_MARKERS["extended"])


def kind(path: Path) -> str:
    """Return the marker of the tests in this file."""
    file = str(path.relative_to(ROOT))
    return KINDS[max(filter(file.startswith, KINDS), key=len)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore modules that only root can import if only pure tests are requested, and modules of
    extended tests if none of these is requested: collecting them would take a third of the time.
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
    """Order tests with clusters first, slow tests before fast ones, so that the last tests are
    short.
    """
    kinds = ["cluster", "kernel", "pure"]
    kind = next(at for at, name in enumerate(kinds) if item.get_closest_marker(name))
    return item.get_closest_marker("slow") is None, kind


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection, because they stay until the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.kit.scheduling import Scheduling  # imports xdist, which other runs do not need

    config.option.loadscopereorder = False  # the order above, not by the number of tests
    return Scheduling(config, log)


@pytest.fixture(autouse=True)
def no_part_fails() -> Iterator[None]:
    """Fail the test if a part of an agent in this process fails unexpectedly."""
    failed = list[PartStatus]()
    parts.connect(failed.append, lambda: None, Path("/nowhere/record"))
    yield
    assert [each for each in failed if parts.is_failing(each.part)] == []


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Failing]:
    """Yield the reports about failed parts that the test expects."""
    made = Failing(tmp_path / "record")
    parts.connect(made.told.append, made.stopped.set, made.record)
    yield made
    parts.connect(lambda status: None, lambda: None, made.record)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that the whole run shares."""
    return once.shared_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def cache(shared: Path) -> Path:
    """Return the directory where all test processes and their agents share compiled programs."""
    return shared / "bytecode" if os.geteuid() else Paths.cache


@pytest.fixture
def fresh_netns() -> Iterator[None]:
    """Move the test's thread into an empty network namespace, which is removed afterwards."""
    from tests.kernel.node import nodes  # imports what only root can use

    with nodes.fresh(f"ebpflb-test-{os.getpid()}-fresh"):
        yield


@pytest.fixture(scope="module")
def started_anew() -> Iterator[None]:
    """Start a file's agents as new processes, as operators do, not as forks."""
    from tests.kit.forked import ForkedAgent  # imports what only root can

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkedAgent, "anew", True)
        yield


@pytest.fixture(scope="session")
def agents_bytecode(shared: Path) -> None:
    """Fill the agents' cache, so that several agents do not compile the same."""
    variants = [
        (datapath.PACKET_SOURCE, (*datapath.packet_flags(), *bare))
        for bare in ((), ("-DNO_LINK_HEADER",))
    ]
    variants.append((datapath.SOCKET_SOURCE, datapath.socket_flags()))
    with once.alone(shared), ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda variant: compile_source(*variant, cache=Paths.cache), variants))
