# SPDX-License-Identifier: Apache-2.0
"""``ebpflb monitor`` shows the result of connections, and watching breaks nothing. This is tested
for sockets, and for packets with both engines.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from ebpflb.serve import status
from tests.cli.described import faults
from tests.kit import monitors, requests, two_nodes
from tests.kit.cluster import NODEPORT, TARGET, VIP, Cluster, endpoint, running, web
from tests.kit.monitors import watching
from tests.kit.sockets import Sockets

OTHER_VIP = "10.96.0.40"


@pytest.fixture
def cluster(cluster: Cluster) -> Cluster:
    """Yield the usual cluster, which serves all its pods."""
    cluster.publish(web(*map(endpoint, cluster.web), nodeport=NODEPORT))
    return cluster


@pytest.mark.extended
def test_a_connection_of_a_socket_is_told(
    cluster: Cluster, pod: Sockets, pods: list[Host], tmp_path: Path
) -> None:
    """The event has the backend that answered, process, pod, service and verdict."""
    with watching(cluster.agent, tmp_path) as monitor:
        answers = [requests.tcp(pod, VIP) for _ in range(5)]
        found: list[dict[str, Any]] = []

        def are_told() -> bool:
            found[:] = [it for it in monitor.events() if it["hook"] == "connect"]
            return len(found) >= len(answers)

        wait_until("an event of each", are_told, 60)
    assert [it["backend_pod"] for it in found] == [answer.name for answer in answers]
    by_name = {host.name: f"{host.v4}:{TARGET}" for host in pods}
    for event in found:
        assert event["backend"] == by_name[event["backend_pod"]]
        assert event["frontend"] == f"{VIP}:80" and event["service"] == "default/web:tcp/TCP"
        assert event["verdict"] == "translated" and event["protocol"] == "TCP"
        assert event["client"] == cluster.client.v4
        assert event["pid"] == pod.process.pid
        assert event["process"].startswith("python")
        assert "client" in event["pod"]
        assert 0 < event["duration"] < 1e9
    said = [json.loads(line) for line in monitor.text().splitlines()]
    assert not [*faults(said, "monitor")]


def test_events_are_filtered(cluster: Cluster, pod: Sockets, host: Sockets, tmp_path: Path) -> None:
    """Events are filtered by service and client; earlier and other events are not shown."""
    other = manifests.service("other", [OTHER_VIP], [{"port": 80}])
    cluster.publish(web(endpoint(cluster.web[0])), other)
    words = ("-o", "json", "--service", "default/web", "--client", f"{cluster.client.v4}/32")
    with watching(cluster.agent, tmp_path, *words) as monitor:
        requests.tcp(host, VIP)
        with pytest.raises(ConnectionRefusedError):
            requests.tcp(pod, OTHER_VIP)
        requests.tcp(pod, VIP)
        monitor.wait_for(lambda it: it["frontend"] == f"{VIP}:80")
        assert monitor.interrupt() == 0
        found = [(it["client"], it["service"]) for it in monitor.events()]
    assert found == [(cluster.client.v4, "default/web:tcp/TCP")]
    assert "1 events shown, 0 lost" in monitor.said()


def test_a_killed_monitor_leaves_the_usual_programs(cluster: Cluster, tmp_path: Path) -> None:
    """During a monitor all hooks have other programs; no audit reports this, and status mentions
    it. After kill -9 the hooks have exactly their former programs.
    """
    before = monitors.programs(cluster.agent)
    with watching(cluster.agent, tmp_path) as first:
        during = monitors.programs(cluster.agent)
        assert during.keys() == before.keys()
        assert not set(during.values()) & set(before.values())
        assert "monitor started" in cluster.agent.log()
        wait_until("the status tells", lambda: monitors.is_monitored(cluster.agent))
        said = cluster.ebpflb("status").stdout
        assert "monitor" in said and said.splitlines()[1].startswith("OK"), said
        first.process.kill()
        first.process.wait(60)
    wait_until("the usual programs", lambda: monitors.programs(cluster.agent) == before)
    wait_until("the status tells", lambda: not monitors.is_monitored(cluster.agent))
    found = status.read(cluster.agent.paths)
    assert found and not found.drift
    assert "drift" not in cluster.agent.log()


def answers_by_client(sockets: Sockets, pod: Host) -> dict[str, str]:
    """Return the name of the backend that answered, by the client's address and port."""
    answers = {}
    for port in range(20_000, 20_005):
        with requests.tcp_socket(sockets, VIP) as client:
            client.bind((pod.v4, port))
            client.connect((VIP, 80))
            answers[f"{pod.v4}:{port}"] = client.recv(64).decode().split()[0]
    return answers


@pytest.mark.extended
@pytest.mark.parametrize("engine", list(Engine))
def test_packets_are_told_with_their_backend(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, engine: Engine
) -> None:
    """The event of an unhooked pod's connection has its port, frontend, answering backend, device
    and verdict; refused connections are shown too. Connections continue during the exchange, and
    the usual programs are back afterwards.
    """
    two_nodes.require(engine)
    with running(tmp_path_factory.mktemp("monitored"), engine=engine) as cluster:
        others = len(monitors.programs(cluster.agent))
        pod = cluster.lab.pod(cluster.node, "machine", 9, hooked=False)
        sockets = cluster.sockets(pod)
        cluster.publish(web(*map(endpoint, cluster.web)))
        hooks = 1 if engine is Engine.NETFILTER else 2
        wait_until("its device", lambda: len(monitors.programs(cluster.agent)) == others + hooks)
        before = monitors.programs(cluster.agent)
        running_client = cluster.start_client(pod, "tcp", VIP)
        with requests.tcp_socket(sockets, VIP) as long:
            long.connect((VIP, 80))
            assert long.recv(64)
            with watching(cluster.agent, tmp_path) as monitor:
                answers = answers_by_client(sockets, pod)
                with pytest.raises(ConnectionRefusedError):
                    requests.tcp(sockets, VIP, 81)
                refused = monitor.wait_for(lambda it: it["verdict"] == "refused")
                found = {it["client"]: it for it in monitor.events() if it["client"] in answers}
            counted = cluster.stop_client(running_client)
            assert not counted["errors"], counted
        addresses = {host.name: f"{host.v4}:{TARGET}" for host in cluster.web}
        assert {client: it["backend_pod"] for client, it in found.items()} == answers
        for event in found.values():
            assert event["backend"] == addresses[event["backend_pod"]]
            assert (event["hook"], event["verdict"]) == ("ingress", "translated")
            assert (event["frontend"], event["service"]) == (f"{VIP}:80", "default/web:tcp/TCP")
            assert event["device"] and not event["device"].isdigit()
        assert (refused["frontend"], refused["backend"]) == (f"{VIP}:81", "")
        wait_until("the usual ones", lambda: monitors.programs(cluster.agent) == before)
