# SPDX-License-Identifier: Apache-2.0
"""Bad manifests under a running agent: one clear line, the rest is served, the good state stays."""

import pytest

from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import VIP, Cluster, endpoint, web

OTHER = "10.96.0.20"


@pytest.fixture(autouse=True)
def other(cluster: Cluster) -> None:
    """A second file, with a service of its own, beside a good first one."""
    service = manifests.service("other", [OTHER], [{"port": 80}])
    slices = manifests.endpoint_slice("other", "IPv4", [endpoint(cluster.web[1])], [{"port": 8080}])
    manifests.write(cluster.agent.manifests / "other.yaml", [service, slices])
    cluster.publish(web(endpoint(cluster.web[0])))


@pytest.fixture
def pod(cluster: Cluster) -> Sockets:
    return cluster.sockets(cluster.client)


def said_about(cluster: Cluster, words: str) -> str:
    """The one line with these words, waiting for it."""
    wait_until(f"a line with {words!r}", lambda: words in cluster.agent.log())
    (line,) = [line for line in cluster.agent.log().splitlines() if words in line]
    return line


def serves(pod: Sockets) -> bool:
    """Both as they were."""
    return [requests.tcp(pod, ip).name for ip in (VIP, OTHER)] == ["web-1", "web-2"]


def test_no_yaml(cluster: Cluster, pod: Sockets) -> None:
    """A file that is not YAML is named; its former objects stay, and other files are still read."""
    (cluster.agent.manifests / "other.yaml").write_text("{ this: is: no: yaml")
    line = said_about(cluster, "neither YAML nor JSON")
    assert str(cluster.agent.manifests / "other.yaml") in line
    cluster.publish(web(endpoint(cluster.web[0])))
    assert serves(pod)


def with_port(port: object) -> Manifest:
    return manifests.service("other", [OTHER], [{"port": port}])


BAD = {
    "spec.ports[0].port": with_port(0),
    "spec.clusterIP": with_port(80) | {"spec": {"clusterIP": "10.96.0.256", "ports": []}},
    "spec.ports": with_port(80) | {"spec": {"clusterIP": OTHER, "ports": 80}},
}


@pytest.mark.parametrize("field", BAD)
def test_bad_service(cluster: Cluster, pod: Sockets, field: str) -> None:
    """An invalid Service: the line names file, object and field."""
    slices = manifests.endpoint_slice("other", "IPv4", [endpoint(cluster.web[1])], [{"port": 8080}])
    before = cluster.agent.log()
    manifests.write(cluster.agent.manifests / "other.yaml", [BAD[field], slices])

    def new_lines() -> list[str]:
        lines = cluster.agent.log().removeprefix(before).splitlines()
        return [line for line in lines if "default/other" in line]

    wait_until("it is said", lambda: bool(new_lines()))
    (line,) = new_lines()
    for part in ("other.yaml", "Service default/other", field):
        assert part in line
    assert serves(pod)


def test_mended(cluster: Cluster, pod: Sockets) -> None:
    """A file that was empty or bad counts as soon as it is good."""
    (cluster.agent.manifests / "other.yaml").write_text("")
    service = manifests.service("other", ["10.96.0.30"], [{"port": 80}])
    slices = manifests.endpoint_slice("other", "IPv4", [endpoint(cluster.web[2])], [{"port": 8080}])
    manifests.write(cluster.agent.manifests / "other.yaml", [service, slices])
    cluster.publish(web(endpoint(cluster.web[0])))
    assert requests.tcp(pod, "10.96.0.30").name == "web-3"
