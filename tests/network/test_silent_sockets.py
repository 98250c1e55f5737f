# SPDX-License-Identifier: Apache-2.0
"""UDP sockets that are silent longer than conntrack would keep their flow.

Unconnected ones see added endpoints then; connected ones keep theirs.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import PORT, VIP, VIP6, Cluster, running
from tests.kit.stale_udp import dual_stack_web

SILENCE = 1  # seconds
CONFIG = f"""
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
conntrack: {{maxPerCore: 0, udpTimeout: {SILENCE}s, udpStreamTimeout: {SILENCE}s}}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder: Path = tmp_path_factory.mktemp("cluster")
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    with running(folder, "--config", str(config)) as made:
        yield made


@pytest.mark.parametrize("vip", [VIP, VIP6], ids=["v4", "v6"])
def test_a_silent_socket_sees_an_added_backend(
    cluster: Cluster, sockets: Sockets, vip: str
) -> None:
    """It keeps its endpoint while it asks, and may get an added one after each silence."""
    first, *added = cluster.web
    cluster.publish(dual_stack_web(first))
    with requests.udp_socket(sockets, vip) as client:
        assert requests.exchange(client, vip).name == first.name
        cluster.publish(dual_stack_web(first, *added))

        def moved() -> bool:
            time.sleep(1.2 * SILENCE)  # what is to be measured: the silence
            return requests.exchange(client, vip).name != first.name

        wait_until("an added endpoint is drawn", moved)


@pytest.mark.parametrize("vip", [VIP, VIP6], ids=["v4", "v6"])
def test_a_connected_socket_keeps_its_backend_however_long_it_is_silent(
    cluster: Cluster, sockets: Sockets, vip: str
) -> None:
    """No hook sees what it sends; when it connects again it may get an added one."""
    first, *added = cluster.web
    cluster.publish(dual_stack_web(first))
    with requests.udp_socket(sockets, vip) as client:
        client.connect((vip, PORT))
        cluster.publish(dual_stack_web(first, *added))
        for _ in range(5):
            client.send(b"?")
            assert requests.receive(client).name == first.name
            time.sleep(1.2 * SILENCE)  # what is to be measured: the silence

        def moved() -> bool:
            time.sleep(1.2 * SILENCE)
            client.connect((vip, PORT))
            client.send(b"?")
            return requests.receive(client).name != first.name

        wait_until("an added endpoint is drawn", moved)
