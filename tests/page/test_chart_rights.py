# SPDX-License-Identifier: Apache-2.0
"""The rights that the chart gives the page's container are enough for all of the page."""

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from pyroute2 import netns

from ebpflb.kernel.node import namespaces
from tests.deploy import helm, seccomp_default
from tests.kit import requests
from tests.kit.cluster import VIP, Cluster, endpoint, running, web

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives rights away")

SECONDS = 240.0
# As in the container: nothing but /tmp can be written.
READ_ONLY = (
    "mount -t tmpfs tmpfs /var/tmp && for it in / /sys /sys/fs/bpf /sys/fs/cgroup; do"
    ' mountpoint -q $it && { mount -o remount,bind,ro $it || exit 1; }; done; exec "$@"'
)


def granted(rights: dict[str, bool]) -> list[str]:
    """Return the capabilities of the page's container that this machine has."""
    (objects,) = helm.render({"ui": {"enabled": True}, "rights": rights})
    _, page = helm.containers(objects)
    names = page["securityContext"]["capabilities"]["add"]
    lines = Path("/proc/self/status").read_text().splitlines()
    (ours,) = (int(it.split()[1], 16) for it in lines if it.startswith("CapBnd:"))
    return [it for it in names if ours >> namespaces.CAPABILITIES[f"CAP_{it}"] & 1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("rights")) as made:
        made.publish(web(*map(endpoint, made.web), ipFamilies=["IPv4"]))
        requests.tcp(made.sockets(made.client), VIP)
        yield made


@contextmanager
def page(cluster: Cluster, **rights: bool) -> Iterator[int]:
    """The port of a page with the rights of these values, in the node's network namespace."""
    bounding = ",".join(["-all", *(f"+{it.lower()}" for it in granted(rights))])
    command = [
        *("unshare", "--mount", "--propagation", "slave", "sh", "-c", READ_ONLY, "sh"),
        *("setpriv", "--no-new-privs", f"--bounding-set={bounding}"),
        *seccomp_default.under(f"CAP_{it}" for it in granted(rights)),
        *("env", "TMPDIR=/var/tmp", "PYTHONDONTWRITEBYTECODE=1"),
        *(sys.executable, "-P", "-m", "ebpflb", "ui"),
        *("--listen", "127.0.0.1:0", *cluster.agent.where),
    ]
    started = cluster.node.start(command, stdout=subprocess.PIPE, stderr=sys.stderr)
    try:
        assert started.stdout
        yield int(started.stdout.readline().split()[0].rstrip("/").rpartition(":")[2])
    finally:
        started.kill()
        started.communicate()


@pytest.fixture
def node(cluster: Cluster) -> Iterator[None]:
    """This thread is in the node's network namespace."""
    netns.pushns(cluster.node.netns)
    yield
    netns.popns()


def get(port: int, path: str, *, status: int = 200, **query: str) -> Any:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as connection:
        connection.request("GET", f"/api/{path}?{urlencode(query)}")
        response = connection.getresponse()
        said = response.read(1 << 20) if path != "events" else response.read1()
        assert response.status == status, said
        return json.loads(said.removeprefix(b"data: "))


@pytest.fixture
def port(cluster: Cluster) -> Iterator[int]:
    with page(cluster) as port:
        yield port


@pytest.mark.extended
def test_without_the_right_to_enter_pods(node: None, cluster: Cluster) -> None:
    """The page explains as the node and as a client outside; of an address that a pod may have it
    says that it cannot see whose it is.
    """
    with page(cluster, enterPods=False) as port:
        assert get(port, "status")["socket_hooks"]
        query: dict[str, Any] = {"to": f"{VIP}:80"}
        for query["from"] in ("node", cluster.node.v4):
            found = get(port, "explain", **query)
            assert (found["from"]["kind"], found["verdict"]) == ("node", "translated")
        query["from"] = cluster.client.v4
        assert "CAP_SYS_ADMIN" in get(port, "explain", status=503, **query)["error"]


@pytest.mark.extended
def test_everything_is_shown(node: None, port: int, cluster: Cluster) -> None:
    """With the rights and the mounts of the chart: each page has its values."""
    assert get(port, "status")["socket_hooks"]
    rows = get(port, "services", match="default/web")["list"]["services"]
    assert get(port, "overview")["maps"][0]["entries"] > 0
    assert "web-1" in [it["name"] for it in get(port, "choices")["pods"]]
    assert [(row["service"], row["used"], row["opened"]) for row in rows] == [("default/web", 3, 1)]
    assert len(get(port, "service", name="default/web")["page"]["ports"]) == 2
    query: dict[str, Any] = {"to": f"{VIP}:80", "from": cluster.client.v4}
    found = get(port, "explain", **query)
    assert (found["from"]["kind"], found["verdict"]) == ("pod", "translated")
    assert get(port, "history", service="default/web")["changes"]
    assert get(port, "events")["error"] == ""
