# SPDX-License-Identifier: Apache-2.0
"""A command that runs where it cannot see its node says only that, and names the command that
helps.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.kernel.attach import cgroup_links
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node import namespaces
from ebpflb.lab.agents import wait_until
from ebpflb.serve import status
from tests.cli.conftest import NEVER, Done, Ebpflb
from tests.kit.cluster import Cluster, endpoint, web

WORDS = (("status",), ("doctor",), ("maps", "dump", "services"), ("cleanup",))


@pytest.fixture(autouse=True)
def serving(cluster: Cluster) -> None:
    cluster.publish(web(*map(endpoint, cluster.web)))
    wait_until("its agent runs", lambda: status.is_running(cluster.agent.paths))


def where_it_is(words: tuple[str, ...], cluster: Cluster) -> list[str]:
    return cluster.agent.where[:2] if words[0] == "maps" else cluster.agent.where


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_where_ip_netns_exec_hides_the_bpffs(cluster: Cluster, words: tuple[str, ...]) -> None:
    """If the node cannot be seen, nothing is reported about it, and nothing is removed."""
    name = cluster.node.netns
    command = ["ip", "netns", "exec", name, sys.executable, "-m", "ebpflb", *words]
    found = subprocess.run(
        [*command, *where_it_is(words, cluster)], capture_output=True, text=True, check=False
    )
    hidden = f"`ip netns exec` hides {cluster.agent.paths.state}"
    helps = f"run `nsenter --net=/run/netns/{name} ebpflb ...` instead"
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.endswith(f"{hidden}: {helps}\n") and found.stderr.count("\n") == 1
    assert cluster.agent.paths.status_file.exists()


def test_in_another_network_namespace(ebpflb: Ebpflb, cluster: Cluster) -> None:
    """The agent's namespace is named by a path, and nothing is compared with the command's own
    namespace.
    """
    done = ebpflb("doctor", *cluster.agent.where, "-o", "json")
    assert_elsewhere(done.error, cluster)


def test_cleanup_in_another_network_namespace(ebpflb: Ebpflb, cluster: Cluster) -> None:
    """Nothing is removed, because the agent's filters and tables would stay behind, and keep
    serving.
    """
    cluster.agent.stop()
    try:
        before = cgroup_links.attached(StateDir(cluster.agent.paths.state))
        done = ebpflb("cleanup", *cluster.agent.where)
        assert_elsewhere(done.error, cluster)
        assert cgroup_links.attached(StateDir(cluster.agent.paths.state)) == before != {}
    finally:
        cluster.agent.start()


def assert_elsewhere(text: str, cluster: Cluster) -> None:
    if namespaces.own_cookie() is None:
        pytest.skip("this kernel has no SO_NETNS_COOKIE")
    assert "this is not the network namespace that the agent serves: run `nsenter --net=" in text
    path = Path(text.partition("--net=")[2].split()[0])
    assert path.samefile(f"/run/netns/{cluster.node.netns}")


def asked(ebpflb: Ebpflb, state: Path) -> Iterator[Done]:
    for command in ("status", "doctor"):
        yield ebpflb(command, "--state-dir", state, "--run-dir", state.parents[1] / "never")


def test_without_a_bpffs(ebpflb: Ebpflb, tmp_path: Path) -> None:
    """The remedy is a directory in a bpffs; the node is not reported as DOWN, whether the directory
    exists or not.
    """
    for state in (tmp_path / "state/ebpflb", tmp_path):
        for done in asked(ebpflb, state):
            assert f"{state} is not in a bpffs here" in done.error
            assert "give a --state-dir below /sys/fs/bpf" in done.err


@pytest.mark.parametrize(
    "case",
    ["doctor -o json", "maps dump", "flows list", "flows flush --all", "explain 10.96.0.10:80"],
)
def test_where_nothing_is_installed(ebpflb: Ebpflb, nowhere: list[str], case: str) -> None:
    """A command that needs the maps says in one line which state directory is missing."""
    where = nowhere if case.startswith("doctor") else nowhere[:2]
    done = ebpflb(*case.split(), *where)
    assert done.error.startswith(f"ebpflb: there is no state directory {NEVER}")


def test_other_state_directories_are_named(ebpflb: Ebpflb, bpffs: Path) -> None:
    """If the given state directory does not exist, the existing ones are named."""
    (bpffs / "one/links").mkdir(parents=True)
    (bpffs / "nodes/two/links").mkdir(parents=True)
    others = f"{bpffs}/nodes/two or {bpffs}/one"
    for done in asked(ebpflb, bpffs / "never"):
        missing = f"there is no state directory {bpffs}/never"
        assert done.error == f"ebpflb: {missing}: give --state-dir {others}\n"
