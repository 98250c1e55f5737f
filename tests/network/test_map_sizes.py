# SPDX-License-Identifier: Apache-2.0
"""--map-size on a node at work: the next agent's maps are larger, and nothing is lost by that."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab.agents import wait_until
from ebpflb.model import addresses
from tests.kit import requests
from tests.kit.cluster import VIP, Cluster, endpoint, running, web

SIZES = "slots=2048,sockets=4096,backends=262144"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running(tmp_path) as made:
        made.publish(web(*map(endpoint, made.web)))
        yield made


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
        cluster.restart(*options)
        wanted = {
            name: spec.entries
            for name, spec in layout.sized(addresses.parse_map_sizes(sizes)).items()
        }
        wait_until("they are in force", partial(has_entries, cluster, wanted))
        assert len(requests.backends(cluster.sockets(cluster.client), VIP)) == 3
        assert len(_map_directories(cluster)) == 2
    assert entries(cluster) == usual
    assert not cluster.stop_client(client)["errors"]


def _map_directories(cluster: Cluster) -> list[Path]:
    apart = ("links", "devices")
    found = cluster.agent.paths.state.iterdir()
    return [it for it in found if not it.is_symlink() and it.name not in apart]
