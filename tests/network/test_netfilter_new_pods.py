# SPDX-License-Identifier: Apache-2.0
"""A pod that asks a service before the agent has attached programs to its device."""

import signal
from pathlib import Path
from socket import SOCK_STREAM

import pytest

from ebpflb.model.packet_path import Engine
from tests.kit import cluster, requests, two_nodes
from tests.kit.cluster import PORT, VIP, VIP6, endpoint, web

A_MOMENT = 0.5  # seconds in which the first segment is sent, and no other
PATIENCE = 10.0  # seconds; TCP sends again after 1, 3 and 7


@pytest.mark.extended
@pytest.mark.parametrize("engine", list(Engine))
@pytest.mark.parametrize("vip", [VIP, VIP6], ids=["v4", "v6"])
def test_its_connection_comes_about(tmp_path: Path, engine: Engine, vip: str) -> None:
    """When its first segment is sent again."""
    two_nodes.require(engine)
    with cluster.running(tmp_path, engine=engine) as made:
        v6 = [endpoint(pod, v6=True) for pod in made.web]
        made.publish(web(*map(endpoint, made.web), v6=v6))
        assert made.agent.process
        made.agent.process.send_signal(signal.SIGSTOP)
        pod = made.lab.pod(made.node, "machine", 9, hooked=False)
        client = made.sockets(pod).open(requests.family_of(vip), SOCK_STREAM)
        client.settimeout(A_MOMENT)
        with pytest.raises(OSError, match=r"timed out|in progress"):
            client.connect((vip, PORT))
        made.agent.process.send_signal(signal.SIGCONT)
        client.settimeout(PATIENCE)
        assert client.recv(64)
