# SPDX-License-Identifier: Apache-2.0
"""The agent's start and end: alone on its maps, serving after its end, and removed without a trace.
This holds for any run directory, mounts and container.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.state_dir import BPFFS
from tests.kit import requests
from tests.kit.cluster import VIP, Cluster, endpoint, running, web
from tests.kit.sockets import Sockets

pytestmark = pytest.mark.usefixtures("started_anew")

A_MOMENT = 0.1  # seconds in which nothing may happen


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Yield a cluster for one test."""
    with running(tmp_path) as made:
        made.publish(web(*map(endpoint, made.web)))
        yield made


def hooks(cluster: Cluster) -> dict[str, list[str]]:
    """Return everything attached to the node's cgroup, by any program."""
    return cgroup_links.foreign_programs(cluster.node.cgroup, ())


def mounting(cluster: Cluster, before: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command on the node, in a mount namespace in which ``before`` mounts something."""
    command = ["unshare", "--mount", "sh", "-ec", f'{before}; exec "$@"', "sh"]
    enter = [*cluster.node.enter, *command, sys.executable, "-P", "-m", "ebpflb", *words]
    return subprocess.run(enter, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("where", ["the same directories", "another run directory", "a container"])
def test_second_agent(cluster: Cluster, pod: Sockets, tmp_path: Path, where: str) -> None:
    """A second agent is refused in one line with the first one's pid, and disturbs nothing."""
    state, run, before = cluster.agent.paths.state, tmp_path / "other", "true"
    attached = hooks(cluster)
    container = where == "a container"
    if container:
        state = tmp_path / "bpf" / state.name
        state.parent.mkdir()
        before = f"mount --bind {BPFFS} {state.parent}"
    elif where == "the same directories":
        run = cluster.agent.paths.run
    words = ["run", "--state-dir", str(state), "--run-dir", str(run), "--manifests", str(tmp_path)]
    more = ["--cgroup-root", str(cluster.node.cgroup), "--healthz-bind-address="]
    done = mounting(cluster, before, *words, *more)
    assert done.returncode == 1
    pid = cluster.agent.process.pid if cluster.agent.process else 0
    who = "an unknown pid" if container else f"pid {pid}"  # it cannot be seen from there
    assert f"another agent ({who}) already serves" in done.stderr
    assert done.stderr.count("\n") == 1
    assert hooks(cluster) == attached
    assert len(requests.backends(pod, VIP)) == 3


def test_nobody_may_hold_its_locks(cluster: Cluster) -> None:
    """Other users cannot read the agent's files: they have mode 0600 in folders of 0700."""
    paths = cluster.agent.paths
    for folder in (paths.state, paths.run):
        assert folder.stat().st_mode & 0o777 == 0o700
    for file in paths.run.iterdir():
        with suppress(FileNotFoundError):  # a new status, which is renamed
            assert file.stat().st_mode & 0o777 == 0o600, file
    own = {paths.lock_file, paths.status_file, paths.ports_file, paths.socket_file}
    assert own <= set(paths.run.iterdir())


def reserved_ports(cluster: Cluster) -> str:
    command = [*cluster.node.enter, "cat", "/proc/sys/net/ipv4/ip_local_reserved_ports"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_cleanup_below_another_mount_point(cluster: Cluster, tmp_path: Path) -> None:
    """`kubectl debug` sees the node under /host. Everything is found, also reserved ports."""
    paths, host = cluster.agent.paths, tmp_path / "host"
    host.mkdir()
    before = f"mount --rbind / {host}"
    where = ["--state-dir", str(host / paths.state.relative_to("/"))]
    done = mounting(cluster, before, "cleanup", *where)
    assert done.returncode == 1 and "still serves" in done.stderr
    cluster.agent.stop()
    assert reserved_ports(cluster)
    done = mounting(cluster, before, "cleanup", *where)
    assert done.returncode == 0, done.stderr
    assert not reserved_ports(cluster)
    assert not paths.state.exists() and not paths.run.exists()


def test_another_run_directory_after_a_kill(cluster: Cluster, tmp_path: Path) -> None:
    """The next agent takes over what the last agent recorded, and removes its files."""
    agent, former = cluster.agent, cluster.agent.paths
    agent.stop()
    record = former.ports_file.read_bytes()
    assert json.loads(record)["ports"]
    agent.paths = type(former)(former.state, tmp_path / "run", former.cache)
    agent.start()
    assert agent.paths.ports_file.read_bytes() == record
    assert not former.run.exists()
    assert os.listdir(agent.paths.run)
