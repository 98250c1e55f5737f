# SPDX-License-Identifier: Apache-2.0
"""UDP sockets that are silent longer than conntrack would keep their flow, on the wire.

tests/native/test_silent_sockets.py has every rule.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.lab.agents import wait_until
from tests.kit import requests
from tests.kit.cluster import VIP, Cluster, running
from tests.kit.sockets import Sockets
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


def test_a_silent_socket_sees_an_added_backend(cluster: Cluster, pod: Sockets) -> None:
    """It keeps its endpoint while it asks, and may get an added one after each silence."""
    first, *added = cluster.web
    cluster.publish(dual_stack_web(first))
    with requests.udp_socket(pod, VIP) as client:
        assert requests.exchange(client, VIP).name == first.name
        cluster.publish(dual_stack_web(first, *added))

        def moved() -> bool:
            time.sleep(1.2 * SILENCE)  # what is to be measured: the silence
            return requests.exchange(client, VIP).name != first.name

        wait_until("an added endpoint is drawn", moved)
