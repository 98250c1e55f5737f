# SPDX-License-Identifier: Apache-2.0
"""The real agent on real maps: what a restart does not do, and what it mends after a crash."""

import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyroute2 import netns

import ebpflb
from ebpflb.kernel import bpf
from ebpflb.kernel.attach import cgroup_links, tcx
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.manifests import Manifest
from ebpflb.plan.map_contents import MapContents
from ebpflb.serve import status
from tests.kit import requests
from tests.kit.cluster import VIP, Cluster, endpoint, running, web

pytestmark = pytest.mark.usefixtures("started_anew")

SERVICES, ENDPOINTS = 250, 5


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster")) as made:
        yield made


def many_services(generation: int) -> list[Manifest]:
    """All endpoints of all services differ between two generations."""
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
    """Nothing changed: not one map entry is written, and nothing is compiled."""
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


def test_no_compiler(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade that does not compile: the old programs serve on, and the status says so."""
    shutil.copytree(Path(ebpflb.__file__).parent, tmp_path / "ebpflb")
    upgraded = Path(shutil.copytree(layout.SOURCES, tmp_path / "bpf")) / "hooks/socket.c"
    upgraded.write_text(f"{upgraded.read_text()}\n#error no such luck\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    before = cgroup_links.attached(StateDir(cluster.agent.paths.state))
    cluster.agent.stop()
    cluster.agent.start()
    cluster.publish(web(endpoint(cluster.web[1])))
    last = status.read(cluster.agent.paths)
    assert last
    assert last.programs.startswith(f"{status.FORMER_PROGRAMS}: hooks/socket.c does not compile")
    assert "no such luck" in cluster.agent.log()
    assert cgroup_links.attached(StateDir(cluster.agent.paths.state)) == before
    assert requests.backends(cluster.sockets(cluster.client), VIP).keys() == {"web-2"}


def at_devices(cluster: Cluster) -> dict[str, list[int]]:
    """Device -> ids of the tcx links at its ingress."""
    netns.pushns(cluster.node.netns)
    try:
        found = {name: index for index, name in socket.if_nameindex() if name != "lo"}
        return {n: list(bpf.query_links(i, tcx.TCX_HOOKS["ingress"])) for n, i in found.items()}
    finally:
        netns.popns()


@pytest.mark.extended
def test_devices_stay(cluster: Cluster) -> None:
    """Killed, the agent leaves its programs at every device; the next one takes them over.

    A device that came while no one was there is served too, and so is one that comes later.
    """
    if not tcx.works():
        pytest.skip("this kernel has no tcx")
    before = at_devices(cluster)
    assert all(len(cgroup_links) == 1 for cgroup_links in before.values())
    cluster.agent.stop(signal.SIGKILL)
    cluster.node.ip("link add between type bridge")
    assert at_devices(cluster) == before | {"between": []}
    cluster.agent.start()
    after = at_devices(cluster)
    assert len(after.pop("between")) == 1
    assert after == before
    cluster.node.ip("link add late type bridge")
    wait_until("the late device is served", lambda: bool(at_devices(cluster)["late"]))
    for name in ("between", "late"):
        cluster.node.ip(f"link del {name}")
