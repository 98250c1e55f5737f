# SPDX-License-Identifier: Apache-2.0
"""An agent whose run or state directory becomes read-only, or is removed, keeps serving and ends in
order.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.lab.agents import LabAgent, wait_until
from ebpflb.lab.hosts import Host
from tests.kit import requests
from tests.kit.cluster import VIP, Cluster, endpoint, web
from tests.kit.lab_cluster import started
from tests.kit.sockets import Sockets

# Busy while the agent has a file there open for writing.
READ_ONLY = """for it; do
  mount --bind "$it" "$it"
  until mount -o remount,bind,ro "$it"; do sleep 0.05; done
done"""


class AloneAgent(LabAgent):
    """An agent in a separate mount namespace, which ends with it."""

    under = ("unshare", "--mount", "--propagation", "private")

    def make_read_only(self, *folders: Path) -> None:
        """Make every path read-only that the agent opens afterwards."""
        assert self.process
        enter = [
            "nsenter",
            f"--target={self.process.pid}",
            "--mount",
            "--root",
            "sh",
            "-ec",
            READ_ONLY,
        ]
        subprocess.run([*enter, "sh", *map(str, folders)], check=True)


class AloneCluster(Cluster):
    def add_agent(self, node: Host, *options: str) -> LabAgent:
        agent = AloneAgent(self.lab, node, self.folder, *options)
        agent.defaults = (f"--packet-path={self.engine}", "--healthz-bind-address=")
        self.agents.append(agent)
        self._write_to(agent)
        return agent


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with started(lambda lab: AloneCluster(lab, tmp_path_factory.mktemp("alone"))) as made:
        yield made


@pytest.fixture
def cluster(alone: Cluster) -> Cluster:
    """Return the cluster with a running agent, whose log is new, and one endpoint."""
    agent = alone.agent
    agent.log_file.write_text("")
    alone.close_maps()  # a pin that was removed is another map now
    if agent.process and agent.process.poll() is not None:
        agent.start()
    alone.publish(web(endpoint(alone.web[0])))
    return alone


def folders(agent: LabAgent, which: str) -> list[Path]:
    return [getattr(agent.paths, name) for name in which.split(" and ")]


def lines(log: str) -> list[str]:
    """Return the log lines without time and level."""
    return [line.split(" ", 2)[-1] for line in log.splitlines()]


@pytest.mark.parametrize("which", ["run", "state", "run and state"])
def test_while_an_agent_runs(cluster: Cluster, pod: Sockets, which: str) -> None:
    """The agent also applies changes; each step of its end is taken, with a line for each object
    left behind. The next agent starts with these objects.
    """
    agent = cluster.agent
    assert isinstance(agent, AloneAgent) and agent.process
    agent.make_read_only(*folders(agent, which))
    cluster.publish(web(*map(endpoint, cluster.web[1:])))
    assert set(requests.backends(pod, VIP)) == {it.name for it in cluster.web[1:]}
    before = len(agent.log())
    agent.stop()
    said = lines(agent.log()[before:])
    assert agent.process.returncode == 0, agent.log()
    assert "Traceback" not in agent.log() and "[Errno" not in agent.log()
    assert "stopped; the loaded programs and maps keep serving" in said
    run, sockets = agent.paths.run, (agent.paths.socket_file, agent.paths.monitor_socket)
    left = [f"stopping: {it}: Read-only file system" for it in sockets] if "run" in which else []
    assert sorted(it for it in said if it.startswith("stopping:")) == sorted(left)
    cannot = f"the status cannot be written ({agent.paths.status_file}:"
    told = [it for it in lines(agent.log()) if it.startswith(cannot)]
    assert len(told) == ("run" in which), agent.log()
    assert set(requests.backends(pod, VIP)) == {it.name for it in cluster.web[1:]}
    agent.start()
    cluster.publish(web(endpoint(cluster.web[2])))
    assert set(requests.backends(pod, VIP)) == {cluster.web[2].name}
    assert not [it for it in run.iterdir() if it.suffix == ".half"]


def test_a_pin_that_cannot_be_put_back(cluster: Cluster, pod: Sockets) -> None:
    """The missing pin is named once, and restored as soon as possible; everything else
    continues.
    """
    agent = cluster.agent
    assert isinstance(agent, AloneAgent)
    agent.make_read_only(agent.paths.state)
    pin = next(path for path in agent.paths.state.rglob("*") if path.name == "services")
    pin.unlink()
    wait_until("it is named", lambda: "Read-only file system" in agent.log())
    assert set(requests.backends(pod, VIP)) == {cluster.web[0].name}
    assert "Traceback" not in agent.log() and "[Errno" not in agent.log()
    agent.stop()
    assert agent.process and agent.process.returncode == 0
    agent.start()
    assert pin.exists()


@pytest.mark.parametrize("which", ["run", "run and state"])
def test_before_an_agent_starts(cluster: Cluster, pod: Sockets, which: str) -> None:
    """The agent ends with one line that names what it needs; the loaded programs keep serving."""
    agent = cluster.agent
    agent.stop()
    where = [*agent.where, "--cgroup-root", str(cluster.node.cgroup), "--healthz-bind-address="]
    command = [sys.executable, "-P", "-m", "ebpflb", "run", *where]
    command += ["--manifests", str(agent.manifests)]
    mounted = f"{READ_ONLY}; exec {shlex.join(command)}"
    enter = [*cluster.node.enter, *AloneAgent.under, "sh", "-ec", mounted, "sh"]
    words = [*enter, *map(str, folders(agent, which))]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("\n") == 1 and "Read-only file system" in done.stderr, done.stderr
    assert str(agent.paths.run) in done.stderr
    assert set(requests.backends(pod, VIP)) == {cluster.web[0].name}
