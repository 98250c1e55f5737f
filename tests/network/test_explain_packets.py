# SPDX-License-Identifier: Apache-2.0
"""``ebpflb explain`` for clients whose packets are translated, by both engines."""

import pytest

from ebpflb.datapath.maps.sweep import FLOW_MAPS
from ebpflb.lab.netns import NETNS
from ebpflb.model.packet_path import Engine
from ebpflb.node import ctnetlink, namespaces
from tests.kit import requests, two_nodes
from tests.kit.cluster import TARGET, VIP, Cluster, endpoint, running, web
from tests.network.test_explain import Said, ask


@pytest.mark.extended
@pytest.mark.parametrize("engine", list(Engine))
def test_packets_of_a_pod_without_hooks(
    tmp_path_factory: pytest.TempPathFactory, engine: Engine
) -> None:
    """The endpoint that explain names for a port is the one that a connection of this port gets;
    asking makes no entry in conntrack or in the flow tables.
    """
    two_nodes.require(engine)
    folder = tmp_path_factory.mktemp("explained")
    with running(folder, f"--packet-path={engine}") as cluster:
        pod = cluster.lab.pod(cluster.node, "machine", 9, hooked=False)
        sockets = cluster.sockets(pod)
        cluster.publish(web(*map(endpoint, cluster.web)))
        for port in range(40_000, 40_004):
            before = known_flows(cluster)
            words = ("--from", pod.v4, "--from-port", str(port))
            said = ask(cluster, f"{VIP}:80", *words, netns=cluster.node.netns)
            assert (said.status, said.data["verdict"]) == (0, "translated"), said.data
            assert not known_flows(cluster) - before  # closed ones may have gone meanwhile
            with requests.tcp_socket(sockets, VIP) as client:
                client.bind((pod.v4, port))
                client.connect((VIP, 80))
                assert client.recv(64).decode().startswith(endpoint_of(said)), (port, said.data)
                assert known_flows(cluster) - before


def known_flows(cluster: Cluster) -> set[str]:
    """Flows to the service, of conntrack and of the flow tables."""
    tables = {str(key) for name in FLOW_MAPS for key, _ in cluster.maps[name].items()}
    inside = namespaces.call_in(
        NETNS / cluster.node.netns, lambda: list(ctnetlink.connections(lambda *_: True))
    )
    return tables | {str(it.original) for it in inside if VIP in str(it.original.destination)}


def endpoint_of(said: Said) -> str:
    """The pod in the row of the endpoint that was drawn."""
    (row,) = [it for it in said.data["steps"] if it["step"] == "endpoint"]
    found: str = row["says"].rpartition("(")[2].rstrip(")")
    return found


def test_an_open_connection(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With its client's port, the answer names the endpoint that conntrack has for an open
    connection, whatever would be chosen for a new one.
    """
    two_nodes.require(Engine.NETFILTER)
    folder = tmp_path_factory.mktemp("open")
    with running(folder, f"--packet-path={Engine.NETFILTER}") as cluster:
        pod = cluster.lab.pod(cluster.node, "machine", 9, hooked=False)
        cluster.publish(web(*map(endpoint, cluster.web)))
        with requests.tcp_socket(cluster.sockets(pod), VIP) as client:
            client.bind((pod.v4, 40_009))
            client.connect((VIP, 80))
            name = client.recv(64).decode().split()[0]
            (kept,) = [each for each in cluster.web if each.name == name]
            cluster.publish(web(*(endpoint(each) for each in cluster.web if each is not kept)))
            words = ("--from", pod.v4, "--from-port", "40009")
            said = ask(cluster, f"{VIP}:80", *words, netns=cluster.node.netns)
            assert (said.status, said.data["verdict"]) == (0, "established"), said.data
            assert any(kept.v4 in row["says"] for row in said.data["steps"]), said.data


@pytest.mark.extended
@pytest.mark.parametrize("engine", list(Engine))
@pytest.mark.parametrize("options", [(), ("--masquerade-all",)], ids=["client", "masqueraded"])
def test_whom_the_endpoint_sees(
    tmp_path_factory: pytest.TempPathFactory, engine: Engine, options: tuple[str, ...]
) -> None:
    """The answer says that the endpoint sees this node just where the endpoint does: in a pod, and
    in a process of the node itself, for which nothing is masqueraded.
    """
    two_nodes.require(engine)
    folder = tmp_path_factory.mktemp("seen")
    with running(folder, f"--packet-path={engine}", *options) as cluster:
        pod = cluster.lab.pod(cluster.node, "machine", 9, hooked=False)
        sockets = cluster.sockets(pod)
        cluster.start_program(cluster.node, "serve", "node", str(TARGET))
        for host in (cluster.web[0], cluster.node):
            cluster.publish(web(endpoint(host)))
            said = ask(cluster, f"{VIP}:80", "--from", pod.v4, netns=cluster.node.netns).data
            answer = requests.tcp(sockets, VIP)
            assert answer.name == host.name
            seen = "the client" if answer.source == pod.v4 else "this node as its client"
            assert said["says"] == f"goes to an endpoint, which sees {seen}", said
