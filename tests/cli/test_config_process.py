# SPDX-License-Identifier: Apache-2.0
"""`ebpflb run --config` as a process on a node of the lab: it serves by the file, and ends when the
file changes (kube-proxy.md 15).
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.lab.agents import LabAgent
from tests.config.files import write
from tests.kit import requests
from tests.kit.cluster import VIP, Cluster, endpoint, running, web

pytestmark = pytest.mark.usefixtures("started_anew")

CHANGED = "config.conf has changed: exiting to be restarted with the new file"
NETFILTER = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that is mounted like a ConfigMap."""
    made = tmp_path_factory.mktemp("config") / "etc"
    (made / "..1").mkdir(parents=True)
    write(made / "..1" / "config.conf", clusterCIDR="10.244.0.0/16", oomScoreAdj=321)
    (made / "..data").symlink_to("..1")
    (made / "config.conf").symlink_to("..data/config.conf")
    return made / "config.conf"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, file: Path) -> Iterator[Cluster]:
    """Yield a node whose agent reads the file, which the last test changes."""
    with running(tmp_path_factory.mktemp("cluster"), "--config", str(file)) as made:
        made.publish(web(*map(endpoint, made.web)))
        yield made


def ended(agent: LabAgent) -> tuple[int, str]:
    """Wait for the agent's end; return its exit status and last line."""
    assert agent.process
    return agent.process.wait(120), agent.log().splitlines()[-1]


def node_reads(cluster: Cluster, path: str) -> str:
    """Return a file's content as seen in the node's network namespace."""
    command = ["nsenter", f"--net=/run/netns/{cluster.node.netns}", "cat", path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def serves(cluster: Cluster) -> bool:
    return len(requests.backends(cluster.sockets(cluster.client), VIP)) == 3


def test_serves_by_the_file(cluster: Cluster) -> None:
    """Services are served; pod CIDRs, conntrack and oom_score_adj are set as in the file."""
    assert serves(cluster)
    assert str(cluster.maps["settings"].get(0).pods_v4.address) == "10.244.0.0"
    assert cluster.agent.process
    adjusted = Path(f"/proc/{cluster.agent.process.pid}/oom_score_adj").read_text()
    assert adjusted.strip() == "321"


def test_tcp_close_wait_timeout(cluster: Cluster) -> None:
    """CLOSE_WAIT lasts an hour, an established connection a day (kube-proxy.md 11.3)."""
    assert node_reads(cluster, f"{NETFILTER}close_wait") == "3600"
    assert node_reads(cluster, f"{NETFILTER}established") == "86400"


def test_config_map_swapped(cluster: Cluster, file: Path) -> None:
    """A changed file ends the agent with status 1 and a line; the loaded programs keep serving; a
    restart reads the new file.
    """
    (file.parent / "..2").mkdir()
    write(file.parent / "..2" / "config.conf", clusterCIDR="10.245.0.0/16")
    (file.parent / "..data_tmp").symlink_to("..2")
    os.rename(file.parent / "..data_tmp", file.parent / "..data")
    assert ended(cluster.agent) == (1, f"ebpflb: {file.parent}/{CHANGED}")
    assert serves(cluster)
    cluster.agent.start()
    assert str(cluster.maps["settings"].get(0).pods_v4.address) == "10.245.0.0"
