# SPDX-License-Identifier: Apache-2.0
"""The agent's beginning and end: alone on its maps, serving after it, and gone without a trace."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab.agents import wait_until
from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import PORT, VIP, Cluster, endpoint, running, web

pytestmark = pytest.mark.usefixtures("started_anew")

A_MOMENT = 0.1  # seconds in which nothing may happen


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One for each test."""
    with running(tmp_path) as made:
        made.publish(web(*map(endpoint, made.web)))
        yield made


def ebpflb(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "ebpflb", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def hooks(cluster: Cluster) -> dict[str, list[str]]:
    """Everything attached to the node's cgroup, whoever's it is."""
    return cgroup_links.foreign_programs(cluster.node.cgroup, ())


def test_second_agent(cluster: Cluster, pod: Sockets) -> None:
    """A second agent on the same state directory is refused in one line, and disturbs nothing."""
    before = hooks(cluster)
    where = [*cluster.agent.where, "--cgroup-root", str(cluster.node.cgroup)]
    done = ebpflb("run", "--manifests", str(cluster.agent.manifests), *where)
    pid = cluster.agent.process.pid if cluster.agent.process else 0
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"another agent (pid {pid}) already serves" in done.stderr
    assert hooks(cluster) == before
    assert len(requests.backends(pod, VIP)) == 3


def test_terminated(cluster: Cluster, pod: Sockets) -> None:
    """SIGTERM ends the agent with status 0 and leaves everything serving."""
    before = hooks(cluster)
    cluster.agent.stop()
    assert cluster.agent.process and cluster.agent.process.returncode == 0
    assert "what is programmed serves on" in cluster.agent.log()
    assert hooks(cluster) == before
    assert len(requests.backends(pod, VIP)) == 3


def test_cleanup(cluster: Cluster, pod: Sockets) -> None:
    """After `ebpflb cleanup` no hook, pin or file is left, and the VIP is not served."""
    cluster.agent.stop()
    assert ebpflb("cleanup", *cluster.agent.where).returncode == 0
    wait_until("the programs are off", lambda: not hooks(cluster))  # the kernel takes its time
    assert not cluster.agent.paths.state.exists()
    assert not cluster.agent.paths.run.exists()
    with requests.tcp_socket(pod, VIP) as client:
        client.settimeout(A_MOMENT)
        with pytest.raises(TimeoutError):
            client.connect((VIP, PORT))


@pytest.mark.extended
def test_after_cleanup(cluster: Cluster, pod: Sockets) -> None:
    """Connections that were open stay open, and a new agent starts from nothing."""
    with requests.tcp_socket(pod, VIP) as client:
        client.connect((VIP, PORT))
        client.recv(64)
        cluster.agent.stop()
        ebpflb("cleanup", *cluster.agent.where)
        client.send(b"still there?")
        assert client.recv(64) == b"still there?"
    cluster.close_maps()
    cluster.agent.start()
    assert len(requests.backends(pod, VIP)) == 3


def is_removed(cgroup: Path) -> bool:
    """It is busy for a moment after its last process was killed."""
    with suppress(OSError):
        cgroup.rmdir()
    return not cgroup.exists()


@pytest.mark.extended
def test_cgroup_made_anew(cluster: Cluster) -> None:
    """A node whose cgroup was removed and made again is served again after a restart."""
    cluster.agent.stop()
    cluster.close_sockets()
    for process in cluster.lab.processes:
        process.kill()
        process.wait()
    wait_until("its last process has left it", lambda: is_removed(cluster.node.cgroup))
    cluster.node.cgroup.mkdir()
    for pod in cluster.web:
        cluster.start_program(pod, "serve", pod.name, "8080")
    cluster.agent.start()
    assert len(requests.backends(cluster.sockets(cluster.client), VIP)) == 3
    assert len(cgroup_links.attached(StateDir(cluster.agent.paths.state))) == len(hooks(cluster))
