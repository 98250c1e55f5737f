# SPDX-License-Identifier: Apache-2.0
"""The chart's rights for the page's container are enough for the whole page."""

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


def granted() -> list[str]:
    """Return the capabilities of the page's container that this machine has."""
    (objects,) = helm.render({"ui": {"enabled": True}})
    _, page = helm.containers(objects)
    names = page["securityContext"]["capabilities"]["add"]
    lines = Path("/proc/self/status").read_text().splitlines()
    (ours,) = (int(it.split()[1], 16) for it in lines if it.startswith("CapBnd:"))
    return [it for it in names if ours >> namespaces.CAPABILITIES[f"CAP_{it}"] & 1]


@contextmanager
def page(cluster: Cluster) -> Iterator[int]:
    """Yield the port of a page with these rights; this thread is in the node's namespace."""
    bounding = ",".join(["-all", *(f"+{it.lower()}" for it in granted())])
    command = [
        *("unshare", "--mount", "--propagation", "slave", "sh", "-c", READ_ONLY, "sh"),
        *("setpriv", "--no-new-privs", f"--bounding-set={bounding}"),
        *seccomp_default.under(f"CAP_{it}" for it in granted()),
        *("env", "TMPDIR=/var/tmp", "PYTHONDONTWRITEBYTECODE=1"),
        *(sys.executable, "-P", "-m", "ebpflb", "ui"),
        *("--listen", "127.0.0.1:0", *cluster.agent.where),
    ]
    started = cluster.node.start(command, stdout=subprocess.PIPE, stderr=sys.stderr)
    netns.pushns(cluster.node.netns)
    try:
        assert started.stdout
        yield int(started.stdout.readline().split()[0].rstrip("/").rpartition(":")[2])
    finally:
        netns.popns()
        started.kill()
        started.communicate()


def get(port: int, path: str, **query: str) -> Any:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)) as connection:
        connection.request("GET", f"/api/{path}?{urlencode(query)}")
        response = connection.getresponse()
        said = response.read(1 << 20) if path != "events" else response.read1()
        assert response.status == 200, said
        return json.loads(said.removeprefix(b"data: "))


@pytest.mark.extended
def test_everything_is_shown(tmp_path: Path) -> None:
    """With only the chart's rights and mounts, each page shows its values."""
    with running(tmp_path) as cluster:
        cluster.publish(web(*map(endpoint, cluster.web), ipFamilies=["IPv4"]))
        requests.tcp(cluster.sockets(cluster.client), VIP)
        with page(cluster) as port:
            assert_shown(port, cluster.client.v4)


def assert_shown(port: int, client: str) -> None:
    assert get(port, "status")["socket_hooks"]
    rows = get(port, "services", match="default/web")["list"]["services"]
    assert get(port, "overview")["maps"][0]["entries"] > 0
    assert "web-1" in [it["name"] for it in get(port, "choices")["pods"]]
    assert [(row["service"], row["used"], row["opened"]) for row in rows] == [("default/web", 3, 1)]
    assert len(get(port, "service", name="default/web")["page"]["ports"]) == 2
    found = get(port, "explain", **{"to": f"{VIP}:80", "from": client})
    assert (found["from"]["kind"], found["verdict"]) == ("pod", "translated")
    assert get(port, "history", service="default/web")["changes"]
    assert get(port, "events")["error"] == ""
