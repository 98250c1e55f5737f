# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run` as a process on a node of the lab: its limits, and how it ends."""

import json
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ebpflb.errors import NodeError
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from ebpflb.serve import status
from tests.kit.lab_cluster import LabCluster, new_lab

pytestmark = pytest.mark.usefixtures("started_anew")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LabCluster]:
    """Return a lab without hosts."""
    with new_lab() as lab:
        made = LabCluster(lab, tmp_path)
        made.engine = Engine.NETFILTER
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def node(cluster: LabCluster) -> Host:
    return cluster.lab.node("node", 1)


FAILING = """
import sys
from ebpflb import stopping
from ebpflb.cli import main
from ebpflb.kernel.netfilter.untracked import UntrackedWatch
stopping.END_AFTER = 0.0
UntrackedWatch.turn = lambda self: [][1023]
sys.argv = ["ebpflb", *sys.argv[sys.argv.index("run"):]]
main()
"""


def test_an_agent_ends_for_a_part_that_fails_and_the_next_serves(
    cluster: LabCluster, node: Host
) -> None:
    """The agent exits in order, with status 1, to be restarted; this happens at most once in ten
    minutes.
    """
    agent = cluster.add_agent(node)
    agent.under = [sys.executable, "-P", "-c", FAILING]
    with suppress(NodeError):  # it may end before it is ready
        cluster.start()
    assert agent.process and agent.process.wait(120) == 1
    said = [line.split(" ", 2)[-1] for line in agent.log().splitlines() if "untracked" in line]
    assert said[0] == "part untracked failed: IndexError: list index out of range"
    assert "part untracked keeps failing, so the agent exits, to be restarted" in said
    assert (
        agent.log().splitlines()[-1]
        == "ebpflb: part untracked keeps failing: exiting to be restarted"
    )
    assert " stopped; " in agent.log()
    agent.start()
    cluster.publish()
    last = status.read(agent.paths)
    assert last and last.failing_parts == {"untracked": "IndexError: list index out of range"}
    assert agent.process.poll() is None


def test_a_log_as_json_and_open_files(cluster: LabCluster, node: Host) -> None:
    """Every line is JSON from the start to the end, and SIGUSR1 adds the stacks of all threads.
    The agent raises its initial limit of 1024 open files, if it may.
    """
    agent = cluster.add_agent(node, "--logging-format=json")
    agent.under = ["prlimit", "--nofile=1024:4096"]
    cluster.start()
    assert agent.process
    assert resource.prlimit(agent.process.pid, resource.RLIMIT_NOFILE) == (4096, 4096)
    agent.process.send_signal(signal.SIGUSR1)
    wait_until("stacks are in the log", lambda: "thread MainThread" in agent.log())
    agent.stop()
    said = [json.loads(line)["msg"] for line in agent.log().splitlines()]
    assert any("agent/loop.py" in each for each in said)
    assert "stopped; " in said[-1]
