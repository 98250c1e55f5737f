# SPDX-License-Identifier: Apache-2.0
"""Endpoints rewritten as fast as can be, and pods deleted, under connections without pause."""

import random
import subprocess
from functools import partial
from typing import Any

from ebpflb.kernel.maps.layout import VERDICTS
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from tests.kit.cluster import PORT, VIP, VIP6, Cluster, endpoint, web
from tests.kit.lab_cluster import NODEPORT, TARGET
from tests.load import scaled

CLIENTS = [("tcp", VIP), ("tcp", VIP6), ("udp", VIP), ("connected-udp", VIP6)]
REWRITES = scaled(150)
BRIEF = 6  # pods that come and go
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


def services(*ready: Host, leaving: tuple[Host, ...] = ()) -> list[Any]:
    """The Service with these pods, of which some have been told to end and still serve."""
    v4, v6 = (
        [
            *(endpoint(pod, v6=family) for pod in ready),
            *(
                endpoint(pod, v6=family, ready=False, serving=True, terminating=True)
                for pod in leaving
            ),
        ]
        for family in (False, True)
    )
    return web(*v4, v6=v6, nodeport=NODEPORT)


def has_clients(pod: Host) -> bool:
    """Whether it has received segments of TCP."""
    command = [*pod.enter, "cat", "/proc/net/snmp"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names, values = (line.split()[1:] for line in said.splitlines() if line.startswith("Tcp:"))
    return int(dict(zip(names, values, strict=True))["InSegs"]) > 0


def test_pods_that_are_drained_and_deleted_lose_no_request(cluster: Cluster) -> None:
    """Each serves on while it terminates, and goes with its network once its endpoint has. Clients
    of every path notice nothing, but connected UDP sockets that are ended.
    """
    lab, node, pods = cluster.lab, cluster.node, cluster.web
    outside = lab.outside("outside", 1)
    cluster.publish(services(*pods))
    ways = [(cluster.client, how, vip, PORT) for how, vip in CLIENTS]
    ways += [(outside, how, node.v4, NODEPORT) for how in ("tcp", "udp")]
    pressing = [cluster.start_client(*way, pause=0.003) for way in ways]
    for number in range(BRIEF):
        brief = lab.pod(node, f"brief-{number}", 20 + number)
        server = cluster.start_program(brief, "serve", brief.name, str(TARGET))
        cluster.publish(services(*pods, brief))
        wait_until("it is asked", partial(has_clients, brief))
        cluster.publish(services(*pods, leaving=(brief,)))
        cluster.publish(services(*pods))
        server.kill()
        server.wait()
        subprocess.run(["ip", "netns", "delete", brief.netns], check=True)
    counts = [cluster.stop_client(process) for process in pressing]
    for (_, how, *_), said in zip(ways, counts, strict=True):
        assert not said["errors"].keys() - (ENDED if how == "connected-udp" else set())
        assert sum(said["names"].values()) > BRIEF
