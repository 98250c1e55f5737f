# SPDX-License-Identifier: Apache-2.0
"""`ebpflb audit`: what differs, once, read-only, agent or no agent; the exit status says it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpflb.kernel import bpf
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.netfilter.rules import MASQUERADE_CHAIN
from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from ebpflb.plan.entries import Backend
from ebpflb.serve import status
from tests.kit import answers, forked, needs, two_nodes
from tests.kit.cluster import TARGET, Cluster, endpoint, running, web


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """Its agent only reports what differs."""
    with running(tmp_path, "--audit=report") as made:
        made.publish(web(*map(endpoint, made.web)))
        wait_until("it is published", lambda: published(made).backends == 6)
        yield made


def published(cluster: Cluster) -> status.AgentStatus:
    found = status.read(cluster.agent.paths)
    assert found
    return found


def audit(cluster: Cluster) -> tuple[int, list[dict[str, Any]]]:
    """Exit status, and what differs."""
    words = ("audit", *cluster.agent.where, "-o", "json")
    done = forked.run(*words, netns=cluster.node.netns)
    assert done.stdout, done.stderr
    return done.returncode, answers.items(done.stdout)


def test_the_cgroup_of_a_hybrid_host(cluster: Cluster, tmp_path: Path) -> None:
    """--cgroup-root may be a directory with a mount of cgroup v2 below it, as for `run`."""
    root = tmp_path / "cgroup"
    root.mkdir()
    mounts = (
        f"mount -t tmpfs tmpfs {root} && mkdir {root}/unified &&"
        f" mount --bind {cluster.node.cgroup} {root}/unified && exec "
    )
    ebpflb = [sys.executable, "-m", "ebpflb", "audit", *map(str, cluster.agent.where)]
    words = [*cluster.node.enter, "unshare", "--mount", "sh", "-euc", f'{mounts} "$@"', "sh"]
    command = [*words, *ebpflb, "--cgroup-root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == "No differences found\n"


def test_hooks_pins_entries_and_objects(cluster: Cluster) -> None:
    """Each kind of drift is named, and nothing is put back."""
    state = StateDir(cluster.agent.paths.state)
    fd = bpf.get(str(state.links_directory / "connect4"))
    assert fd is not None
    bpf.link_detach(fd)
    (state.links_directory / "sendmsg4").unlink()
    maps = state.open_maps()
    key = next(key for key, _ in maps["cluster_ips"].items())
    maps["cluster_ips"].delete([key])
    maps["no_frontends"].write([(7, 0)])
    cluster.agent.stop()
    code, found = audit(cluster)
    texts = [f"{each['name']} {each['found']}" for each in found]
    assert code == 1
    assert "hook connect4 is not attached" in texts
    assert any(text.startswith("hook sendmsg4 has no pin") for text in texts)
    assert any(text.startswith(f"map cluster_ips: {key} ") for text in texts)
    assert "map no_frontends: #7 differs" in texts
    assert not maps["cluster_ips"].get(key)
    for opened in maps.values():
        opened.close()


def test_what_the_cluster_asks(cluster: Cluster) -> None:
    """Endpoints that left while no agent ran are told from a fresh list."""
    cluster.agent.stop()
    for file in cluster.agent.manifests.iterdir():
        file.write_text(file.read_text().replace(cluster.web[0].v4, "10.99.0.1"))
    code, found = audit(cluster)
    assert code == 1
    assert {each["found"] for each in found} == {
        f"has {cluster.web[0].v4}:{TARGET} instead of 10.99.0.1:{TARGET}"
    }


EDITS: dict[str, Callable[[Backend], Backend]] = {
    "another port": lambda slot: slot._replace(port=9999),
    "another backend's id": lambda slot: slot._replace(id=slot.id + 1),
    "another weight": lambda slot: slot._replace(weight=7),
    "another service": lambda slot: slot._replace(service=77),
}


@pytest.mark.parametrize("packet_path", Engine)
def test_one_edited_slot_is_one_line(tmp_path: Path, packet_path: Engine) -> None:
    """It names the slot and its service port, and not what else a plan would have to write."""
    two_nodes.require(packet_path)
    with running(tmp_path, "--audit=report", engine=packet_path) as cluster:
        cluster.publish(web(*map(endpoint, cluster.web)))
        wait_until("it is published", lambda: published(cluster).backends == 6)
        slots = cluster.maps["slots"]
        entry = next(it for _, it in cluster.maps["services"].items() if it.block.size)
        at, before = entry.block.base, slots.get(entry.block.base)
        for what, edit in EDITS.items():
            slots.write([(at, edit(before))])
            code, found = audit(cluster)
            (drift,) = found
            assert code == 1 and drift["name"].startswith(f"map slots: #{at} of default/web:"), what
        slots.write([(at, before)])
        assert audit(cluster) == (0, [])


def test_what_differs_is_said_though_the_cluster_cannot_be_asked(cluster: Cluster) -> None:
    """Where its objects cannot be listed that is said too, and the exit status is 1."""
    state = StateDir(cluster.agent.paths.state)
    (state.links_directory / "sendmsg4").unlink()
    cluster.agent.stop()
    cluster.agent.manifests.rename(cluster.agent.manifests.with_name("elsewhere"))
    code, found = audit(cluster)
    assert code == 1
    assert {each["name"] for each in found} == {"hook sendmsg4"}


@pytest.fixture
def stopped(tmp_path: Path) -> Iterator[Cluster]:
    """Its agent has served with netfilter, and has ended: anyone can change the table."""
    needs.netfilter()
    options = ("--packet-path=netfilter", "--masquerade-ports=40000-40999")
    with running(tmp_path, *options) as made:
        made.publish(web(*map(endpoint, made.web)))
        wait_until("it serves", lambda: published(made).backends == 6)
        made.agent.stop()
        yield made


TABLE = "table inet ebpflb"


def test_netfilters_table(stopped: Cluster) -> None:
    """Each thing that differs is named, in the rules and in the elements."""
    assert audit(stopped) == (0, [])
    elements = json.loads(nft(stopped, "--json", "list", "map", "inet", "ebpflb", "backends4"))
    pods = [pod.v4 for pod in stopped.web]  # there may be one of a canary that has just gone
    known = elements["nftables"][1]["map"]["elem"]
    key = next(key for key, endpoint in known if endpoint["concat"][0] in pods)
    nft(stopped, "delete", "element", "inet", "ebpflb", "backends4", f"{{ {key} }}")
    nft(stopped, "flush", "chain", "inet", "ebpflb", MASQUERADE_CHAIN)
    code, found = audit(stopped)
    texts = [f"{each['name']} {each['found']}" for each in found]
    assert code == 1
    assert any(text.startswith(f"{TABLE} chain {MASQUERADE_CHAIN}: ") for text in texts)
    assert any(text.startswith(f"{TABLE}: backends4: backend ") for text in texts)
    nft(stopped, "delete", *TABLE.split())
    assert audit(stopped) == (1, [{"part": "table", "name": TABLE, "found": "is missing"}])


def nft(cluster: Cluster, *words: str) -> str:
    command = [*cluster.node.enter, "nft", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
