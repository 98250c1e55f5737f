# SPDX-License-Identifier: Apache-2.0
"""Others may take our programs off a device: a running agent finds out and puts them back."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.datapath.attach import tcx
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.lab.agents import wait_until
from tests.kit.cluster import Cluster, endpoint, running, web


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """One whose agent looks every second."""
    with running(tmp_path, "--iptables-sync-period=1s") as made:
        made.publish(web(*map(endpoint, made.web)))
        yield made


def in_node(cluster: Cluster, words: str) -> str:
    command = [*cluster.node.enter, *words.split()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_taken_off(cluster: Cluster) -> None:
    """A program that is detached without an event of the device is attached again, and reported."""
    there = StateDir(cluster.agent.paths.state).devices_directory
    before = sorted(path.name for path in there.iterdir())
    if any(name.endswith("-clsact") for name in before):
        in_node(cluster, "tc qdisc del dev eth0 clsact")
        wait_until("it is back", lambda: "clsact" in in_node(cluster, "tc qdisc show dev eth0"))
    else:
        tcx.detach(there / before[0])
    wait_until("it is said", lambda: "programs were removed from device" in cluster.agent.log())
    wait_until("all are back", lambda: sorted(path.name for path in there.iterdir()) == before)
