# SPDX-License-Identifier: Apache-2.0
"""``ebpflb monitor``: what it shows is what connections do, and looking breaks nothing; of sockets,
of packets with both engines, and with --shadow.
"""

import json
import signal
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
from tests.load import scaled

OTHER_VIP = "10.96.0.40"


@pytest.fixture
def cluster(cluster: Cluster) -> Cluster:
    """The usual one, which serves all its pods."""
    cluster.publish(web(*map(endpoint, cluster.web), nodeport=NODEPORT))
    return cluster


@pytest.mark.extended
def test_a_connection_of_a_socket_is_told(
    cluster: Cluster, pod: Sockets, pods: list[Host], tmp_path: Path
) -> None:
    """Its backend is the one that has answered; process, pod, service and verdict are told."""
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


def test_what_is_refused_or_to_nobody(cluster: Cluster, pod: Sockets, tmp_path: Path) -> None:
    """Refused is told with the frontend and no backend; what is no one's where it is asked for."""
    cluster.publish(web())
    words = ("-o", "json", "--verdict", "refused", "--verdict", "passed")
    with watching(cluster.agent, tmp_path, *words) as monitor:
        with pytest.raises(ConnectionRefusedError):
            requests.tcp(pod, VIP)
        with requests.udp_socket(pod, cluster.node.v4) as client:
            client.connect((cluster.node.v4, 9))
        refused = monitor.wait_for(lambda it: it["verdict"] == "refused")
        passed = monitor.wait_for(lambda it: it["frontend"] == f"{cluster.node.v4}:9")
    assert (refused["frontend"], refused["backend"]) == (f"{VIP}:80", None)
    assert refused["service"] == "default/web:tcp/TCP"
    assert (passed["verdict"], passed["hook"], passed["service"]) == ("passed", "connect", None)


def test_filters(cluster: Cluster, pod: Sockets, host: Sockets, tmp_path: Path) -> None:
    """Events are filtered by service and client; others are not shown, though they happened
    before.
    """
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


def test_killed_monitors_leave_the_usual_programs(
    cluster: Cluster, pod: Sockets, tmp_path: Path
) -> None:
    """While one runs all hooks have other programs, which no audit complains of and status tells;
    after kill -9 the very ones of before, also where two ran.
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
        (tmp_path / "second").mkdir()
        with watching(cluster.agent, tmp_path / "second") as second:
            first.process.kill()
            first.process.wait(60)
            requests.tcp(pod, VIP)
            second.wait_for(lambda it: it["verdict"] == "translated")
            assert monitors.programs(cluster.agent) == during
    wait_until("the usual programs", lambda: monitors.programs(cluster.agent) == before)
    wait_until("the status tells", lambda: not monitors.is_monitored(cluster.agent))
    found = status.read(cluster.agent.paths)
    assert found and not found.drift
    assert "drift" not in cluster.agent.log()


@pytest.mark.extended
def test_no_connection_fails_while_programs_are_exchanged(cluster: Cluster, tmp_path: Path) -> None:
    """Sockets of a pod and of the node, TCP and UDP, through monitors that come and go."""
    clients = [
        cluster.start_client(cluster.client, "tcp", VIP),
        cluster.start_client(cluster.node, "tcp", VIP),
        cluster.start_client(cluster.client, "udp", VIP),
    ]
    for _ in range(scaled(10)):
        with watching(cluster.agent, tmp_path, "-o", "json", "--client", "192.0.2.99"):
            pass
    for client in clients:
        counted = cluster.stop_client(client)
        assert not counted["errors"], counted


def test_a_new_device_tells_too(cluster: Cluster, tmp_path: Path) -> None:
    """A device that a CNI makes while a monitor runs has the programs of the others."""
    name = "ebpflb-new"
    with watching(cluster.agent, tmp_path):
        before = monitors.programs(cluster.agent)
        cluster.node.ip(f"link add {name} type veth peer name {name}-b", f"link set {name} up")
        try:
            wait_until(
                "the device is served", lambda: len(monitors.programs(cluster.agent)) > len(before)
            )
            now = monitors.programs(cluster.agent)
            assert {now[key] for key in now.keys() - before.keys()} <= set(before.values())
        finally:
            cluster.node.ip(f"link del {name}")


@pytest.mark.extended
def test_a_restarted_agent_attaches_the_usual_programs(
    cluster: Cluster, pod: Sockets, tmp_path: Path
) -> None:
    """After SIGTERM they are back at once, after kill -9 when the next agent starts; the monitor
    ends with one sentence.
    """
    for how in (signal.SIGTERM, signal.SIGKILL):
        before = monitors.programs(cluster.agent)
        with watching(cluster.agent, tmp_path) as monitor:
            during = monitors.programs(cluster.agent)
            cluster.agent.stop(how)
            assert monitor.process.wait(60) == 1
            assert "the agent has stopped or reloaded its programs" in monitor.said()
            is_back = monitors.programs(cluster.agent) == before
            assert is_back == (how == signal.SIGTERM)
            requests.tcp(pod, VIP)
        cluster.agent.start()
        now = monitors.programs(cluster.agent)
        assert not set(now.values()) & set(during.values())
        requests.tcp(pod, VIP)


@pytest.mark.parametrize("output", ["table", "wide", "json", "yaml"])
def test_names_are_escaped(cluster: Cluster, pod: Sockets, tmp_path: Path, output: str) -> None:
    """A terminal is shown the name of a pod, and does not act on it."""
    named = {"targetRef": {"kind": "Pod", "name": "a\x1b[2Jb"}}
    cluster.publish(web(endpoint(cluster.web[0]) | named))
    with watching(cluster.agent, tmp_path, "-o", output, "--count", "1") as monitor:
        requests.tcp(pod, VIP)
        assert monitor.process.wait(60) == 0
    assert "\x1b" not in monitor.text()
    assert output == "table" or "[2Jb" in monitor.text()


def answers_by_client(sockets: Sockets, pod: Host) -> dict[str, str]:
    """The name of the backend that has answered, by the client's address and port."""
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
    """Each connection of a pod without hooks: its client's port, frontend, the backend that has
    answered, the device and the verdict; what is refused too. Connections go on during the
    exchange, and the usual programs are back afterwards.
    """
    two_nodes.require(engine)
    with running(tmp_path_factory.mktemp("monitored"), engine=engine) as cluster:
        others = len(monitors.programs(cluster.agent))
        pod = cluster.lab.pod(cluster.node, "machine", 9, hooked=False)
        sockets = cluster.sockets(pod)
        cluster.publish(web(*map(endpoint, cluster.web)))
        wait_until("its device", lambda: len(monitors.programs(cluster.agent)) == others + 2)
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
        assert (refused["frontend"], refused["backend"]) == (f"{VIP}:81", None)
        wait_until("the usual ones", lambda: monitors.programs(cluster.agent) == before)


@pytest.mark.extended
def test_a_shadow_tells_where_a_call_would_go(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """The backend that a call of the node would get, and none where it would be refused."""
    with running(tmp_path_factory.mktemp("shadow"), "--shadow") as shadow:
        shadow.publish(web(endpoint(shadow.web[0])))
        with (
            watching(shadow.agent, tmp_path) as monitor,
            requests.udp_socket(shadow.sockets(shadow.node), VIP) as client,
        ):
            client.connect((VIP, 80))
            translated = monitor.wait_for(lambda it: it["frontend"] == f"{VIP}:80")
            shadow.publish(web())
            client.connect((VIP, 80))
            refused = monitor.wait_for(lambda it: it["verdict"] == "refused")
    assert (translated["verdict"], translated["hook"]) == ("translated", "connect")
    assert translated["backend"] == f"{shadow.web[0].v4}:{TARGET}"
    assert translated["backend_pod"] == shadow.web[0].name
    assert (refused["frontend"], refused["backend"]) == (f"{VIP}:80", None)
