# SPDX-License-Identifier: Apache-2.0
"""--map-size on a node at work: the next agent's maps are larger, and nothing is lost by that."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ebpflb.kernel.maps import map_sizes
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab.agents import wait_until
from tests.kit import forked, requests
from tests.kit.cluster import VIP, Cluster, endpoint, running, web

SIZES = "slots=2048,sockets=4096,backends=262144"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path) as made:
        made.publish(web(*map(endpoint, made.web)))
        yield made


def restart(cluster: Cluster, *options: str) -> None:
    cluster.agent.stop()
    cluster.agent.options = options
    cluster.agent.start()


def entries(cluster: Cluster) -> dict[str, int]:
    """Map -> how many entries it may have, as commands see it."""
    maps: dict[str, Map] = StateDir(cluster.agent.paths.state).read_maps()
    for opened in maps.values():
        opened.close()
    return {name: opened.spec.entries for name, opened in maps.items()}


def has_entries(cluster: Cluster, wanted: dict[str, int]) -> bool:
    return entries(cluster) == wanted


@pytest.mark.extended
def test_sizes_change_under_traffic(cluster: Cluster) -> None:
    """There and back: each time all maps are new ones, and no connection fails."""
    usual = entries(cluster)
    client = cluster.start_client(cluster.client, "tcp", VIP, pause=0.005)
    for options, sizes in ((f"--map-size={SIZES}",), SIZES), ((), ""):
        restart(cluster, *options)
        wanted = {
            name: spec.entries for name, spec in map_sizes.sized(map_sizes.parse(sizes)).items()
        }
        wait_until("they are in force", partial(has_entries, cluster, wanted))
        assert len(requests.backends(cluster.sockets(cluster.client), VIP)) == 3
        assert len(_map_directories(cluster)) == 2
    assert entries(cluster) == usual
    assert not cluster.stop_client(client)["errors"]


@pytest.mark.extended
def test_commands_need_no_option(cluster: Cluster) -> None:
    """They find the maps that are in force, by the record in the state directory."""
    restart(cluster, "--map-size", "backends=262144", "--map-size", "slots=2048")
    requests.tcp(cluster.sockets(cluster.client), VIP)
    for words in (("services", "list"), ("maps", "dump", "services"), ("audit",)):
        where = cluster.agent.where[: 2 if words[0] == "maps" else 4]
        more = ("--cgroup-root", str(cluster.node.cgroup)) if words == ("audit",) else ()
        done = forked.run(*words, *where, *more, netns=cluster.node.netns)
        said = "No differences found\n" if words == ("audit",) else ""
        assert (done.returncode, done.stderr) == (0, said), done.stdout


@pytest.mark.extended
def test_a_lost_record_is_put_back(cluster: Cluster) -> None:
    """By the audit: without it commands would look for the usual maps."""
    restart(cluster, "--map-size=slots=2048", "--iptables-sync-period=200ms")
    record = cluster.agent.paths.state / map_sizes.SIZES_LINK
    os.unlink(record)
    wait_until("it is there", record.is_symlink)
    wait_until("it is named", lambda: "differs from --map-size" in cluster.agent.log())


def test_a_wrong_size_changes_nothing(cluster: Cluster) -> None:
    """One line, and what an earlier agent has attached serves on."""
    before = entries(cluster)
    cluster.agent.stop()
    where = (*cluster.agent.where, "--manifests", str(cluster.agent.manifests))
    done = forked.run("run", *where, "--map-size=flows=12", netns=cluster.node.netns)
    assert done.returncode == 2
    assert '"flows=12" is not flows=ENTRIES with 66560 to 16777216 entries' in done.stderr
    assert entries(cluster) == before
    requests.tcp(cluster.sockets(cluster.client), VIP)


def _map_directories(cluster: Cluster) -> list[Path]:
    apart = ("links", "devices")
    found = cluster.agent.paths.state.iterdir()
    return [it for it in found if not it.is_symlink() and it.name not in apart]
