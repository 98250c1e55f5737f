# SPDX-License-Identifier: Apache-2.0
"""The real agent on real maps: what a restart skips, and what it repairs after a crash."""

from collections.abc import Iterator

import pytest

from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab import manifests
from ebpflb.lab.manifests import Manifest
from ebpflb.plan.map_contents import MapContents
from tests.kit.cluster import Cluster, endpoint, running, web

pytestmark = pytest.mark.usefixtures("started_anew")

SERVICES, ENDPOINTS = 250, 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster")) as made:
        yield made


def many_services(generation: int) -> list[Manifest]:
    """Return two generations of services without a common endpoint."""
    made = []
    for i in range(SERVICES):
        name, ip = f"s{i}", f"10.97.{i // 250}.{i % 250 + 1}"
        ips = [f"10.{generation}.{i // 250}.{n + i % 250}" for n in range(ENDPOINTS)]
        endpoints = [manifests.endpoint(ip, node="node", target="it") for ip in ips]
        made.append(manifests.service(name, [ip], [{"port": 80}]))
        made.append(manifests.endpoint_slice(name, "IPv4", endpoints, [{"port": 8080}]))
    return made


def map_contents(cluster: Cluster) -> MapContents:
    datapath = Datapath(StateDir(cluster.agent.paths.state))
    try:
        return datapath.read_contents()
    finally:
        datapath.close()


def logged_since(cluster: Cluster, before: str) -> str:
    return cluster.agent.log().removeprefix(before)


@pytest.mark.extended
def test_warm_restart(cluster: Cluster) -> None:
    """If nothing has changed, no map entry is written, and nothing is compiled."""
    cluster.publish(web(*map(endpoint, cluster.web), nodeport=30080), many_services(1))
    cluster.agent.stop()
    settings, log = cluster.maps["settings"], cluster.agent.log()
    before = settings.get(0)
    cluster.agent.start()
    assert settings.get(0) == before
    logged = logged_since(cluster, log)
    assert "Plan" not in logged
    assert "programs from the cache" in logged
    assert f"serving {len(map_contents(cluster).entries)} service ports" in logged
