# SPDX-License-Identifier: Apache-2.0
"""``ebpflb monitor`` of packets, with both engines, and with --shadow."""

from pathlib import Path

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import Sockets
from ebpflb.model.packet_path import Engine
from tests.kit import monitors, requests, two_nodes
from tests.kit.cluster import TARGET, VIP, endpoint, running, web
from tests.kit.monitors import watching


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
    folder = tmp_path_factory.mktemp("monitored")
    with running(folder, f"--packet-path={engine}") as cluster:
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
        assert (refused["frontend"], refused["backend"]) == (f"{VIP}:81", "")
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
    assert (refused["frontend"], refused["backend"]) == (f"{VIP}:80", "")
