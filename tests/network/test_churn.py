# SPDX-License-Identifier: Apache-2.0
"""Endpoints rewritten as fast as can be, under connections without pause: none fails."""

import random
from typing import Any

from ebpflb.datapath.maps.layout import VERDICTS
from ebpflb.lab import manifests
from tests.kit.cluster import VIP, VIP6, Cluster, endpoint, web
from tests.load import scaled

CLIENTS = [("tcp", VIP), ("tcp", VIP6), ("udp", VIP), ("connected-udp", VIP6)]
REWRITES = scaled(150)
ENDED = {"ECONNABORTED", "EDESTADDRREQ"}  # of a socket that was ended


def some(pods: list[Any]) -> list[Any]:
    return random.sample(pods, random.randint(1, len(pods)))


def turmoil(cluster: Cluster) -> list[Any]:
    """A new set of endpoints, never an empty one, again and again; what the clients counted."""
    v4, v6 = [endpoint(pod) for pod in cluster.web], [endpoint(pod, v6=True) for pod in cluster.web]
    node = manifests.node("node", cluster.node.v4)
    cluster.publish(node, web(*v4, v6=v6))
    pressing = [cluster.start_client(cluster.client, *client) for client in CLIENTS]
    for _ in range(REWRITES):
        manifests.write(cluster.agent.manifests / "all.yaml", [node, *web(*some(v4), v6=some(v6))])
    cluster.publish(node, web(*v4, v6=v6))
    return [cluster.stop_client(process) for process in pressing]


def test_nothing_fails(cluster: Cluster) -> None:
    """Every send is answered, and no slot is ever found to be another service's twice; but those
    who asked in a connected UDP socket whose backend went are told so (kube-proxy.md 11.1).
    """
    counts = turmoil(cluster)
    for (how, _), said in zip(CLIENTS, counts, strict=True):
        assert not said["errors"].keys() - (ENDED if how == "connected-udp" else set())
        assert len(said["names"]) == 3
    counted = {name: cluster.maps["verdicts"].get(i)[0] for i, name in VERDICTS.items()}
    assert counted["recycled"] == counted["refused"] == 0
    assert counted["translated"] >= sum(sum(said["names"].values()) for said in counts)
