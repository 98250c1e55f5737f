# SPDX-License-Identifier: Apache-2.0
"""A first start that fails leaves the node unchanged: settings, ports, pins, tables, files."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpflb.kernel.attach.cgroup_links import cgroup_root
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.state_dir import BPFFS, StateDir
from ebpflb.lab import manifests
from ebpflb.lab.netns import Namespace, ip
from tests.kit.api_server import FakeApiServer

READ = """
import subprocess, sys
from pathlib import Path
for name in sys.argv[1:]:
    path = Path("/proc/sys/net") / name
    print(path, path.read_text().strip() if path.exists() else None)
print(subprocess.run(["nft", "list", "tables"], capture_output=True, text=True).stdout)
"""
SETTINGS = (
    "ipv4/ip_local_reserved_ports",
    "netfilter/nf_conntrack_tcp_timeout_established",
    "netfilter/nf_conntrack_tcp_timeout_close_wait",
    "netfilter/nf_conntrack_tcp_be_liberal",
    "netfilter/nf_conntrack_udp_timeout",
    "netfilter/nf_conntrack_udp_timeout_stream",
)
KUBECONFIG: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "it",
    "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
    "users": [{"name": "it", "user": {"token": "none"}}],
}
CHOSEN = (
    "--conntrack-tcp-timeout-established=11h",
    "--conntrack-tcp-timeout-close-wait=11m",
    "--conntrack-udp-timeout=11s",
    "--conntrack-udp-timeout-stream=111s",
    "--conntrack-tcp-be-liberal",
    "--masquerade-ports=20000-20999",
    "--healthz-bind-address=",
    "--metrics-bind-address=",
)


class Node:
    """A network namespace, and an agent that is to start there."""

    def __init__(self, netns: str, folder: Path) -> None:
        self.namespace = Namespace(netns)
        self.folder = folder
        self.state, self.run = BPFFS / netns, folder / "run"
        self.cgroup = cgroup_root() / netns
        (folder / "tmp").mkdir()

    def look(self) -> tuple[str, bool, bool, list[str]]:
        """Return the node's settings and tables, its pins and records, and temporary files."""
        command = [*self.namespace.enter, sys.executable, "-IS", "-c", READ, *SETTINGS]
        seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        files = os.listdir(self.run) if self.run.exists() else []
        left = [name for name in files if name.endswith(".ports")]
        return seen, self.state.exists(), bool(left), os.listdir(self.folder / "tmp")

    def start(self, *options: object) -> "subprocess.Popen[str]":
        where = ("--state-dir", self.state, "--run-dir", self.run, "--node-name", "node-1")
        words = ["run", *where, "--cgroup-root", self.cgroup, *CHOSEN, *options]
        command = [*self.namespace.enter, sys.executable, "-P", "-m", "ebpflb", *map(str, words)]
        environment = {**os.environ, "TMPDIR": str(self.folder / "tmp")}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )

    def fail(self, *options: object) -> str:
        """Return the message of a start that must fail."""
        process = self.start(*options)
        try:
            said, _ = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 1, said
        return said.splitlines()[-1]


LEFT_SETTINGS = {  # by a kube-proxy, and by an agent that was killed and whose files are gone
    "net.ipv4.ip_local_reserved_ports": "20000-20999",
    "net.ipv4.ip_forward": 1,
    "net.ipv4.conf.all.route_localnet": 1,
    "net.ipv4.conf.all.rp_filter": 1,
    "net.netfilter.nf_conntrack_tcp_timeout_established": 86400,
    "net.netfilter.nf_conntrack_tcp_timeout_close_wait": 3600,
    "net.netfilter.nf_conntrack_tcp_be_liberal": 1,
}
# The agent's own table is not among them: a start removes one that no connection needs.
LEFT_TABLES = (("ip", "kube-proxy"), ("ip6", "kube-proxy"))


def use(namespace: Namespace) -> None:
    """Leave the node as a kube-proxy and an agent would leave it."""
    for name, value in LEFT_SETTINGS.items():
        namespace.sysctl(name, value)
    for table in LEFT_TABLES:
        subprocess.run([*namespace.enter, "nft", "add", "table", *table], check=True)


@pytest.fixture(params=[False, True], ids=["new", "used"])
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    """Yield a new node, and a node that a kube-proxy and an agent have used."""
    made = Node(f"ebpflb-failing-{os.getpid()}", tmp_path)
    made.namespace.create()
    made.cgroup.mkdir()
    try:
        if request.param:
            use(made.namespace)
        yield made
    finally:
        unpin_all(StateDir(made.state))
        made.cgroup.rmdir()
        ip("netns", "delete", made.namespace.netns)


def cluster(**more: object) -> str:
    return json.dumps({**KUBECONFIG, "clusters": [{"name": "it", "cluster": more}]})


UNUSABLE = {
    "not YAML": "clusters: [",
    "empty": "",
    "without a context": "apiVersion: v1",
    "without an address": cluster(server="node-1"),
    "a CA that is not there": cluster(**{"server": "https://x", "certificate-authority": "/no"}),
    "a CA that is none": cluster(
        **{"server": "https://x", "certificate-authority": "/etc/hostname"}
    ),
    "an inline CA that is none": cluster(
        **{"server": "https://x", "certificate-authority-data": "aGVsbG8="}
    ),
}


@pytest.mark.parametrize("content", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_kubeconfig_changes_nothing(node: Node, tmp_path: Path, content: str) -> None:
    """Timeouts, reserved ports, pins and tables are unchanged; the file is named."""
    (kubeconfig := tmp_path / "kubeconfig").write_text(content)
    before = node.look()
    assert str(kubeconfig) in node.fail("--kubeconfig", kubeconfig)
    assert node.look() == before


def test_a_start_that_fails_late_is_undone(node: Node, tmp_path: Path) -> None:
    """Without a pod CIDR of the primary family the start fails after making maps and programs."""
    (folder := tmp_path / "manifests").mkdir()
    found = manifests.node("node-1", "192.0.2.1", podCIDRs=["fd00::/64"], podCIDR="fd00::/64")
    (folder / "node.json").write_text(json.dumps(found))
    before = node.look()
    said = node.fail("--manifests", folder, "--detect-local-mode=NodeCIDR")
    assert "the configuration does not fit the Node" in said
    assert node.look() == before


@pytest.mark.parametrize("until", ["readiness server", "W http://"])
def test_an_agent_that_waits_or_is_still_being_built_is_stopped(
    node: Node, tmp_path: Path, until: str
) -> None:
    """If an agent waits for an API server that cannot be reached, SIGTERM ends it without an error,
    and the node's settings stay.
    """
    before = node.look()[0]
    with FakeApiServer() as api:
        kubeconfig = api.kubeconfig(tmp_path)
    process = node.start("--kubeconfig", kubeconfig)
    try:
        assert process.stdout
        assert any(until in line for line in process.stdout), "the agent ended"
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest
    assert node.look()[0] == before
