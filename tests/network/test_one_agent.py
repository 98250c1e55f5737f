# SPDX-License-Identifier: Apache-2.0
"""One agent on one state directory, whatever its run directory, mounts and container."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ebpflb.kernel.maps.state_dir import BPFFS
from ebpflb.lab.sockets import Sockets
from tests.kit import forked, requests
from tests.kit.cluster import VIP, Cluster, endpoint, running, web


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster")) as made:
        made.publish(web(*map(endpoint, made.web)))
        yield made


def ebpflb(cluster: Cluster, *words: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    """A command on the node, in a mount namespace of its own where ``before`` mounts something."""
    if not before:
        return forked.run(*words, netns=cluster.node.netns)
    command = ["unshare", "--mount", "sh", "-ec", f'{before}; exec "$@"', "sh"]
    enter = [*cluster.node.enter, *command, sys.executable, "-P", "-m", "ebpflb", *words]
    return subprocess.run(enter, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("container", [False, True], ids=["another run directory", "a container"])
def test_second_agent(cluster: Cluster, pod: Sockets, tmp_path: Path, container: bool) -> None:
    """It is refused with the first one's pid, and disturbs nothing."""
    state = cluster.agent.paths.state
    before = ""
    if container:
        state = tmp_path / "bpf" / state.name
        state.parent.mkdir()
        before = f"mount --bind {BPFFS} {state.parent}"
    run = tmp_path / "other"
    where = ["--state-dir", str(state), "--run-dir", str(run)]
    more = ["--cgroup-root", str(cluster.node.cgroup), "--healthz-bind-address="]
    done = ebpflb(cluster, "run", *where, *more, "--manifests", str(tmp_path), before=before)
    assert done.returncode == 1
    pid = cluster.agent.process.pid if cluster.agent.process else 0
    who = "an unknown pid" if container else f"pid {pid}"  # it cannot be seen from there
    assert f"another agent ({who}) already serves" in done.stderr
    assert done.stderr.count("\n") == 1
    assert len(requests.backends(pod, VIP)) == 3


def test_one_option_is_enough(cluster: Cluster) -> None:
    """`status` and `cleanup` find the run directory by the state directory."""
    where = ["--state-dir", str(cluster.agent.paths.state)]
    done = ebpflb(cluster, "status", *where, "-o", "json")
    shown = json.loads(done.stdout)
    assert shown["agent"] == "runs"
    assert shown["pid"] == (cluster.agent.process.pid if cluster.agent.process else 0)
    done = ebpflb(cluster, "cleanup", *where)
    assert done.returncode == 1
    assert "still serves" in done.stderr and str(shown["pid"]) in done.stderr


def test_nobody_may_hold_its_locks(cluster: Cluster) -> None:
    """Nor read its files: 0600 in folders of 0700."""
    paths = cluster.agent.paths
    for folder in (paths.state, paths.run):
        assert folder.stat().st_mode & 0o777 == 0o700
    for file in paths.run.iterdir():
        with suppress(FileNotFoundError):  # a new status, which is renamed
            assert file.stat().st_mode & 0o777 == 0o600, file
    own = {paths.lock_file, paths.status_file, paths.ports_file, paths.socket_file}
    assert own <= set(paths.run.iterdir())


def test_cleanup_below_another_mount_point(cluster: Cluster, tmp_path: Path) -> None:
    """As `kubectl debug` sees the node: under /host. All is found, also the reserved ports."""
    paths, host = cluster.agent.paths, tmp_path / "host"
    host.mkdir()
    before = f"mount --rbind / {host}"
    where = ["--state-dir", str(host / paths.state.relative_to("/"))]
    done = ebpflb(cluster, "cleanup", *where, before=before)
    assert done.returncode == 1 and "still serves" in done.stderr
    cluster.agent.stop()
    reserved = "/proc/sys/net/ipv4/ip_local_reserved_ports"
    ports = subprocess.run(
        [*cluster.node.enter, "cat", reserved], capture_output=True, text=True, check=True
    )
    assert ports.stdout.strip()
    done = ebpflb(cluster, "cleanup", *where, before=before)
    assert done.returncode == 0, done.stderr
    ports = subprocess.run(
        [*cluster.node.enter, "cat", reserved], capture_output=True, text=True, check=True
    )
    assert not ports.stdout.strip()
    assert not paths.state.exists() and not paths.run.exists()
    cluster.agent.start()


def test_another_run_directory_after_a_kill(cluster: Cluster, tmp_path: Path) -> None:
    """The next agent takes over what the last one recorded; its files are removed."""
    agent, former = cluster.agent, cluster.agent.paths
    agent.stop()
    record = former.ports_file.read_bytes()
    assert json.loads(record)["ports"]
    agent.paths = type(former)(former.state, tmp_path / "run", former.cache)
    agent.start()
    assert agent.paths.ports_file.read_bytes() == record
    assert not former.run.exists()
    assert os.listdir(agent.paths.run)
