# SPDX-License-Identifier: Apache-2.0
"""If an agent of another version runs, or none, each command says so in a sentence with a
remedy.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest

from ebpflb import unix_socket
from ebpflb.kernel.maps.state_dir import BPFFS, remove_tree
from ebpflb.kernel.monitoring import MonitorAnswer
from ebpflb.options import Paths
from tests.cli.conftest import Ebpflb
from tests.kit.cluster import Cluster, endpoint, web

OLDER = MonitorAnswer("the agent has another version: use the agent's own `ebpflb`")
OTHER_MAPS = "by another version of ebpflb: use that version"
STRANGE = b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"pages": 1}'


@pytest.fixture(scope="module", autouse=True)
def published(cluster: Cluster) -> None:
    cluster.publish(web(*map(endpoint, cluster.web)))


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run directory where no agent listens yet."""
    made = tmp_path / "run"
    made.mkdir()
    return made


def answering(path: Path, answer: bytes) -> Iterator[None]:
    """Answer everything that is sent to this socket with this text."""
    with closing(unix_socket.listen(path)) as listening:

        def serve() -> None:
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                with client, suppress(OSError):  # it may have left
                    client.recv(4096)
                    client.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        listening.shutdown(2)
        thread.join(60)


@pytest.fixture
def strange_answers(cluster: Cluster, run_dir: Path) -> Iterator[None]:
    """Run an agent whose answers have no meaning in this version."""
    yield from answering(Paths(cluster.agent.paths.state, run_dir).socket_file, STRANGE)


@pytest.fixture
def refused_monitors(cluster: Cluster, run_dir: Path) -> Iterator[None]:
    """An agent whose events have another layout."""
    path = Paths(cluster.agent.paths.state, run_dir).monitor_socket
    yield from answering(path, msgspec.json.encode(OLDER) + b"\n")


def test_services_of_another_version(
    ebpflb: Ebpflb, state: list[str], run_dir: Path, strange_answers: None
) -> None:
    """The command names an alternative, with the reason."""
    for words in (("get", "default/web"), ("list",)):
        done = ebpflb("services", *words, *state, "--run-dir", run_dir)
        assert (done.status, done.out) == (1, "")
        assert done.err.startswith("ebpflb: the agent is of another version: only the agent knows")


def test_a_monitor_needs_the_agents_version(
    ebpflb: Ebpflb, state: list[str], run_dir: Path, refused_monitors: None
) -> None:
    done = ebpflb("monitor", *state, "--run-dir", run_dir)
    assert done.status == 1
    assert done.err.splitlines()[-1] == f"ebpflb: no monitor can be started: {OLDER.error}"


def test_no_agent(ebpflb: Ebpflb, state: list[str], run_dir: Path) -> None:
    """`monitor` says how to start an agent."""
    monitor = ebpflb("monitor", *state, "--run-dir", run_dir)
    assert (monitor.status, monitor.out) == (1, "")
    assert monitor.err.splitlines()[-1].startswith(
        "ebpflb: no agent is running: start `ebpflb run`"
    )


@pytest.fixture
def other_maps() -> Iterator[Path]:
    """Return the state directory of another version."""
    directory = BPFFS / f"ebpflb-test-{os.getpid()}-other"
    (directory / "0123456789ab").mkdir(parents=True)
    yield directory
    remove_tree(directory)


def test_status_says_that_maps_are_of_another_version(
    ebpflb: Ebpflb, other_maps: Path, run_dir: Path
) -> None:
    """Instead of missing counts, the status says that the maps are of another version."""
    done = ebpflb("status", "--state-dir", other_maps, "--run-dir", run_dir)
    assert OTHER_MAPS in " ".join(done.out.split())


@pytest.mark.parametrize(
    "words",
    [("monitor", "--service", "a\x1b[2J/b"), ("services", "get", "a\x1b[2J/b")],
    ids=["monitor", "services get"],
)
def test_control_characters_of_a_name_are_escaped(
    ebpflb: Ebpflb, cluster: Cluster, words: tuple[str, ...]
) -> None:
    """The error about an unknown Service escapes control characters in its name."""
    done = ebpflb(*words, *cluster.agent.where)
    assert done.status == 1 and "no Service a" in done.err
    assert "\x1b" not in done.err and "\\x1b[2J/b" in done.err
