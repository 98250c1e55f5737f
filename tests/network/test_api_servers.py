# SPDX-License-Identifier: Apache-2.0
"""Three API servers without a load balancer, replaced and dying under load (docs/api-servers.md).

A client in a pod asks default/kubernetes, translated by the packet path of each engine; another
client on the node asks its loopback, translated at its sockets.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from pyroute2 import netns

from ebpflb.entries.services import Frontend
from ebpflb.errors import NodeError, NotFound
from ebpflb.kernel.attach.device_programs import unpin_all
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.lab import manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.model.packet_path import Engine
from ebpflb.serve import status
from ebpflb.serve.service_page import USED
from ebpflb.tools import ask
from tests.kit import https_load
from tests.kit.api_server import FakeApiServer
from tests.kit.certificates import self_signed
from tests.kit.cluster import Cluster
from tests.kit.lab_cluster import new_lab
from tests.kit.two_nodes import ENGINES, require
from tests.load import paused, scaled

VIP, VIP_PORT, API_PORT = "10.96.0.1", 443, 6443
LOCAL = "127.0.0.1", 7445
PAUSE = paused(0.05)  # seconds between two requests of a client
PATIENCE = max(5.0, 60 * PAUSE)  # seconds that a client waits for an answer
SERVICE = [{"name": "https", "port": VIP_PORT, "protocol": "TCP"}]
SLICE = [{"name": "https", "port": API_PORT, "protocol": "TCP"}]
_numbers = count(1)  # of Services
DEAD = "chain {0} {{\ntype filter hook {0} priority -300; policy drop;\n}}\n"


class Servers:
    """API servers in pods, which all have seen the same changes."""

    def __init__(self, cluster: Cluster, folder: Path, stack: ExitStack) -> None:
        self.cluster, self.pods = cluster, cluster.web
        self._stack = stack
        self._certificate = self_signed(folder, *(f"IP:{pod.v4}" for pod in self.pods))
        self._changes: list[Manifest] = []
        self.live: dict[Host, FakeApiServer] = {}

    def start(self, pod: Host) -> FakeApiServer:
        netns.pushns(pod.netns)
        try:
            made = FakeApiServer(port=API_PORT, certificate=self._certificate, address=pod.v4)
        finally:
            netns.popns()
        for change in self._changes:
            made.put(change)
        self.live[pod] = self._stack.enter_context(made)
        return made

    def stop(self, pod: Host) -> None:
        api = self.live.pop(pod)
        api.__exit__()
        api.hang_up()

    def put(self, *changes: Manifest) -> None:
        self._changes += changes
        for api in self.live.values():
            for change in changes:
                api.put(change)

    def name(self, *pods: Host) -> None:
        """Make these the endpoints; return when the agent has written them."""
        slice: Any = manifests.endpoint_slice("kubernetes", "IPv4", [], SLICE)
        self.put(slice | {"endpoints": [{"addresses": [pod.v4]} for pod in pods]})
        wait_until("the agent knows", lambda: used(self.cluster) == {pod.v4 for pod in pods})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def cluster(request: pytest.FixtureRequest, folder: Path) -> Iterator[Cluster]:
    engine: Engine = request.param
    require(engine)
    with new_lab() as lab, pytest.MonkeyPatch.context() as patch:
        made = Cluster(lab, folder / engine, engine=engine)
        patch.setenv("NO_PROXY", ",".join(pod.v4 for pod in made.web))
        try:
            yield made
        finally:
            made.agent.paths.api_servers_file.unlink(missing_ok=True)
            made.close()


@pytest.fixture(scope="module")
def servers(cluster: Cluster, folder: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        made = Servers(cluster, folder, stack)
        made.put(
            manifests.service("kubernetes", [VIP], SERVICE), manifests.node("node", cluster.node.v4)
        )
        first = made.start(made.pods[0])
        cluster.agent.options = (
            *("--kubeconfig", str(first.kubeconfig(folder))),
            *("--api-server", f"{made.pods[0].v4}:{API_PORT}"),
            *("--local-api-server", "{}:{}".format(*LOCAL)),
            *("--socket-translation", "host"),
        )
        for pod in made.pods[1:]:
            made.start(pod)
        cluster.agent.start()
        made.name(*made.pods)
        yield made


def used(cluster: Cluster) -> set[str]:
    """Return the addresses of the API servers that get new connections; none without an agent."""
    try:
        ports = ask.service(cluster.agent.paths, "default", "kubernetes").ports
    except (NodeError, NotFound):
        return set()
    rows = [row for port in ports for row in port.endpoints]
    return {row.endpoint.partition(":")[0] for row in rows if row.state == USED}


def loads(cluster: Cluster, *pods: Host, pause: float) -> "list[subprocess.Popen[str]]":
    """Start a client in each of these pods, in the pod "client", and on the node.

    Each client begins a request every ``pause`` seconds.
    """
    program, pipe = Path(https_load.__file__), subprocess.PIPE
    return [
        cluster.lab.keep_ready(
            host.python(program, *to, str(pause), str(PATIENCE), stdin=pipe, stdout=pipe)
        )
        for host, to in (
            *((pod, (VIP, str(VIP_PORT))) for pod in (cluster.client, *pods)),
            (cluster.node, (LOCAL[0], str(LOCAL[1]))),
        )
    ]


def failed(running: "list[subprocess.Popen[str]]") -> list[tuple[float, str]]:
    """Return when each failed request began, and why."""
    found: list[tuple[float, str]] = []
    for process in running:
        said, _ = process.communicate("", timeout=60)
        counted = json.loads(said)
        assert counted["succeeded"] > scaled(5), counted
        found += counted["failed"]
    return found


def test_replaced_one_after_the_other(cluster: Cluster, servers: Servers) -> None:
    """No connection fails: each server stops being an endpoint before it is stopped."""
    running = loads(cluster, pause=PAUSE)
    for pod in servers.pods:
        servers.name(*(each for each in servers.pods if each != pod))
        time.sleep(PATIENCE / 5)  # what has begun before may end
        servers.stop(pod)
        servers.start(pod)
        servers.name(*servers.pods)
    assert failed(running) == []


@pytest.mark.parametrize("kind", ["externalIPs", "status.loadBalancer"])
def test_no_service_hides_an_api_server(cluster: Cluster, servers: Servers, kind: str) -> None:
    """If a Service claims the API servers' addresses and port, agent, node and pod still reach
    them, even if an earlier agent's maps gave these to the Service.
    """
    addresses, agent, group = [pod.v4 for pod in servers.pods], cluster.agent, cluster.node.cgroup
    assert agent.process
    (group / "cgroup.procs").write_text(str(agent.process.pid))  # where sockets are translated
    taken: dict[str, Any] = {"externalIPs": addresses}
    if kind == "status.loadBalancer":
        taken = {"type": "LoadBalancer", "ingress": addresses}
    port = [{"name": "https", "port": API_PORT, "protocol": "TCP"}]
    closed = [manifests.endpoint(cluster.node.v4, node="node", target="thief")]
    servers.put(
        manifests.endpoint_slice("thief", "IPv4", closed, [{**port[0], "port": 9}]),
        manifests.service("thief", ["10.96.0.66"], port, **taken),
    )
    wait_until("the agent knows the thief", lambda: "default/thief" in listed(cluster))
    follows(cluster, servers, f"first-{len(kind)}")
    last = status.read(agent.paths)
    assert last and last.claimed_twice == {
        f"{address}:{API_PORT}/TCP": "an API server has it, not default/thief"
        for address in addresses
    }
    shown = cluster.ebpflb("services", "get", "default/thief", "-o", "wide").stdout
    assert shown.count("this agent reaches an API server there") == len(addresses)
    agent.stop()
    let_in(cluster, addresses)
    assert not asks(cluster.node, addresses[0])
    agent.under = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    agent.start()
    follows(cluster, servers, f"second-{len(kind)}")
    servers.put(manifests.service("thief", ["10.96.0.66"], port))
    agent.under = ()
    (cluster.lab.cgroup / "cgroup.procs").write_text(str(agent.process.pid))  # as before


def let_in(cluster: Cluster, addresses: list[str]) -> None:
    """Write the frontends of the claiming Service, as an earlier version did."""
    maps = cluster.maps
    own = maps["services"].get(Frontend(ip_address("10.96.0.66"), API_PORT, 6))
    taken = own._replace(flags=own.flags | {"external"})
    maps["services"].write([(Frontend(ip_address(it), API_PORT, 6), taken) for it in addresses])
    maps["no_frontends"].write([(at, 0) for at in range(maps["no_frontends"].spec.entries)])


def follows(cluster: Cluster, servers: Servers, name: str) -> None:
    """Check that the agent connects to an API server again, and that node and pod can."""
    for api in servers.live.values():
        api.hang_up()
    servers.put(manifests.service(name, [f"10.96.1.{next(_numbers)}"], SERVICE))
    wait_until("the agent hears of a change", lambda: f"default/{name}" in listed(cluster))
    for pod in servers.pods:
        assert asks(cluster.node, pod.v4) and asks(cluster.client, pod.v4)


def asks(host: Host, address: str) -> bool:
    """Whether a process of the host has a connection to the API server."""
    connect = f"import socket; socket.create_connection(('{address}', {API_PORT}), 2)"
    return host.start([sys.executable, "-IS", "-c", connect]).wait(10) == 0


def test_one_dies_unannounced(cluster: Cluster, servers: Servers) -> None:
    """The dead server is set aside after three clients failed, and no other connection fails. The
    agent, whose only own server it was, uses the remaining servers, also after a reboot.
    """
    dead, *others = servers.pods
    alive = {pod.v4 for pod in others}
    clients = [cluster.lab.pod(cluster.node, f"client-{i}", i) for i in (3, 4)]
    running = loads(cluster, *clients, pause=10 * PAUSE)
    dead.nft("table inet dead {\n" + DEAD.format("input") + DEAD.format("output") + "}\n")
    wait_until("it is set aside", lambda: used(cluster) == alive)
    aside = time.monotonic()
    time.sleep(PATIENCE / 5)
    assert [each for each in failed(running) if each[0] > aside] == []
    servers.put(manifests.service("late", ["10.96.0.99"], SERVICE))
    wait_until("the agent follows the others", lambda: "default/late" in listed(cluster))
    reboot(cluster)
    explained = cluster.ebpflb("explain", "{}:{}".format(*LOCAL)).stdout
    assert "Loopback of default/kubernetes" in explained, explained


def listed(cluster: Cluster) -> list[str]:
    return [row.service for row in ask.services(cluster.agent.paths, ("*",), 100).services]


def reboot(cluster: Cluster) -> None:
    """Remove programs, maps and the agent's status; its cache stays."""
    agent = cluster.agent
    agent.stop(signal.SIGKILL)
    cluster.close_maps()
    unpin_all(StateDir(agent.paths.state))
    agent.start()
    last = status.read(agent.paths)
    assert last and last.lists_complete
