# SPDX-License-Identifier: Apache-2.0
"""Load balancer addresses on three nodes: from the pool to the first request, and when nodes fail
(docs/load-balancer-addresses.md). All tests use the same nodes, in this order.

    one, two, three  nodes with an agent, and a pod each that answers; at eth0 is the segment of the
                     pool, at eth1 another one with the Nodes' addresses
    outside          a client beyond the router, which asks the segment for an address
    api              the API server, beyond the router too
"""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

import pytest

from ebpflb.lab import cni, manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.netns import Namespace
from ebpflb.lab.router import NODES
from ebpflb.model.pools import CLASS
from ebpflb.serve import status
from tests.kernel.node import nodes
from tests.kit import forked, requests
from tests.kit.api_server import FakeApiServer
from tests.kit.lab_cluster import PORT, TARGET, LabCluster, new_lab

POOL = "192.0.2.200-192.0.2.210,10.66.0.1-10.66.0.250,fd02::200-fd02::210"
FIRST = ("192.0.2.200", "fd02::200")
NAMES = ("one", "two", "three")


def _inner(number: int) -> tuple[str, str]:
    """The addresses of a Node."""
    return f"10.99.0.{number}/24", f"fd99::{number}/64"


class ThreeNodes(LabCluster):
    """The nodes, and a Service of our class whose endpoints are the pods of all."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        super().__init__(lab, folder)
        self.nodes = [lab.node(name, number) for number, name in enumerate(NAMES, 1)]
        lab.router.ip("link add inner type bridge", "link set inner up")
        for number, node in enumerate(self.nodes, 1):
            lab.router.ip(
                f"link add inner{number} type veth peer name eth1 netns {node.netns}",
                f"link set inner{number} master inner up",
            )
            node.ip("link set eth1 up", *(f"address add {at} dev eth1" for at in _inner(number)))
        for one, other in zip(self.nodes, (*self.nodes[1:], self.nodes[0]), strict=True):
            lab.join(one, other)
        self.pods = [lab.pod(node, f"pod-{node.name}", 11) for node in self.nodes]
        self.outside, self.place = lab.outside("outside", 1), lab.outside("api", 2)
        for pod in self.pods:
            self.start_program(pod, "serve", pod.name, str(TARGET))

    def begin(self, api: FakeApiServer) -> None:
        self.api = api
        options = "--kubeconfig", str(api.kubeconfig(self.folder)), "--l2-pool", POOL
        for number, node in enumerate(self.nodes, 1):
            own = [str(ip_interface(it).ip) for it in _inner(number)]
            api.put(manifests.node(node.name, *own))
            self.add_agent(node, *options, "--cluster-cidr", ",".join(cni.NETWORKS))
        self.add_service("web", 1)
        for agent in self.agents:
            agent.start()

    def take_no_part(self, node: int) -> None:
        """Restart an agent without the option."""
        agent = self.agents[node]
        agent.stop()
        agent.options = tuple(it for it in agent.options if it not in ("--l2-pool", POOL))
        agent.start()

    def clean_up(self, node: int) -> None:
        agent = self.agents[node]
        agent.stop()
        done = forked.run("cleanup", *agent.where, netns=agent.node.netns)
        assert done.returncode == 0, done.stderr
        assert not agent.paths.state.exists()

    def add_service(
        self,
        name: str,
        number: int,
        namespace: str = "default",
        among: tuple[str, ...] = NAMES,
        **spec: Any,
    ) -> None:
        ports = [{"name": "tcp", "port": PORT, "protocol": "TCP"}]
        ips = [f"10.96.0.{number}", f"fd00:96::{number}"]
        kind = {"type": "LoadBalancer", "loadBalancerClass": CLASS, **spec}
        made = manifests.service(name, ips, ports, namespace=namespace, **kind)
        made["metadata"] |= {"creationTimestamp": f"2026-01-01T00:00:{number:02}Z", "uid": name}
        named = [{"name": "tcp", "port": TARGET, "protocol": "TCP"}]
        for family in ("v4", "v6"):
            found = [
                manifests.endpoint(getattr(pod, family), node=node.name, target=pod.name)
                for pod, node in zip(self.pods, self.nodes, strict=True)
                if node.name in among
            ]
            kind_of = f"IP{family}"
            self.api.put(manifests.endpoint_slice(name, kind_of, found, named, namespace=namespace))
        self.api.put(made)

    def addresses(self, name: str) -> list[str]:
        """What the Service's status has."""
        found = [it for it in self.api.objects("Service") if it["metadata"]["name"] == name]
        return [it["ip"] for it in found[0]["status"]["loadBalancer"].get("ingress", [])]

    def status(self, node: int) -> status.AgentStatus:
        found = status.read(self.agents[node].paths)
        assert found
        return found

    def owners(self, address: str, among: tuple[int, ...] = (0, 1, 2)) -> set[str]:
        """Who answers for an address, as these nodes say."""
        return {self.status(node).address_owners.get(address, "") for node in among}

    def wait_for_owner(self, address: str, among: tuple[int, ...] = (0, 1, 2)) -> int:
        """Return the node that answers for the address, once they agree."""

        def agree() -> bool:
            (owner, *others) = self.owners(address, among)
            return not others and owner in [NAMES[node] for node in among]

        wait_until(f"one node answers for {address}", agree, 60)
        (owner,) = self.owners(address, among)
        return NAMES.index(owner)

    def asks(self, address: str, *, again: bool = False) -> str:
        """The endpoint that answered a request; ``again``: by a new ARP question."""
        if again:
            self.lab.router.ip(f"neigh flush to {address} dev {NODES.name}")
        return requests.tcp(self.sockets(self.outside), address).name

    def answers(self, address: str, *, again: bool = False) -> bool:
        try:
            return bool(self.asks(address, again=again))
        except OSError:
            return False

    def pull(self, node: int, *, back: bool = False) -> None:
        """Pull the cable of a node, or plug it in again."""
        self.lab.router.ip(f"link set {NODES.name}{node + 1} {'up' if back else 'down'}")

    def neighbour(self, name: str, number: int, *addresses: str) -> Namespace:
        """A machine on the segment that is no node."""
        made = Namespace(f"{self.lab.prefix}-{name}")
        made.create(self.lab.cgroup)
        self.lab.router.plug(made, NODES, number)
        for address in addresses:
            made.ip(f"address add {address} dev eth0")
        return made


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeNodes]:
    with new_lab() as lab, pytest.MonkeyPatch.context() as patch:
        cluster = ThreeNodes(lab, tmp_path_factory.mktemp("three"))
        patch.setenv("NO_PROXY", cluster.place.v4)
        try:
            with served(cluster.place) as api:
                cluster.begin(api)
                yield cluster
        finally:
            cluster.close()


@contextmanager
def served(place: Host) -> Iterator[FakeApiServer]:
    with nodes.entered(place.netns):
        made = FakeApiServer(port=6443, address=place.v4)
    with made:
        yield made
        made.hang_up()


def test_from_the_pool_to_the_first_request_and_a_pulled_cable(three: ThreeNodes) -> None:
    """Both families. Another node takes over, and there is one owner again when the first is back.
    `status` and `services get` name the owner.
    """
    wait_until("the Service has addresses", lambda: three.addresses("web") == [*FIRST], 60)
    for address in FIRST:
        three.wait_for_owner(address)
        assert three.asks(address)
    owner = three.wait_for_owner(FIRST[0])
    said = three.ebpflb("services", "get", "default/web")
    answers = f"{FIRST[0]} is answered for by {NAMES[owner]} (owner of 3 living nodes)"
    assert answers in said.stderr + said.stdout
    shown = three.ebpflb("status").stdout
    assert "addresses            2 announced by this cluster" in shown
    assert "other programs first" not in shown
    told = three.ebpflb("explain", f"{FIRST[0]}:{PORT}", "--from", "outside").stderr
    assert f"note: {answers}\n" in told
    three.pull(owner)
    others = tuple(node for node in range(3) if node != owner)
    three.wait_for_owner(FIRST[0], others)
    wait_until("requests are served", lambda: three.answers(FIRST[0]), 30)
    wait_until("it hears nobody", lambda: bool(three.status(owner).not_announced), 30)
    three.pull(owner, back=True)
    assert three.wait_for_owner(FIRST[0]) == owner
    for address in FIRST:  # a connection breaks that the router gives to both owners
        wait_until("requests are served", lambda: three.answers(address, again=True), 30)  # noqa: B023


def test_agents_are_killed(three: ThreeNodes) -> None:
    """One by one, then all: the address stays where it is, also for hosts that ask for it again.

    The next agents change nothing.
    """
    wait_until("the Service has addresses", lambda: three.addresses("web") == [*FIRST], 60)
    owner = three.wait_for_owner(FIRST[0])
    v6_owner = three.wait_for_owner(FIRST[1])
    moves = [three.status(node).address_moves for node in range(3)]
    for agent in (three.agents[owner], *three.agents):
        agent.stop(signal.SIGKILL)
        if agent is three.agents[v6_owner]:
            with nodes.entered(agent.node.netns):
                taken = nodes.run("ip", "maddress", "show", "dev", "eth0")
            assert "33:33:ff:00:02:00" in taken, "a real device would drop solicitations"
        for address in FIRST:
            assert three.answers(address, again=True)
    for agent in three.agents:
        agent.start()
    assert three.wait_for_owner(FIRST[0]) == owner
    assert three.answers(FIRST[0], again=True)
    assert [three.status(node).address_moves for node in range(3)] == [0, 0, 0], moves


FLOOD = """
import socket, sys, time
out = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
out.bind(("eth0", 0x806))
mac = out.getsockname()[4]
arp = b"\\0\\1\\x08\\0\\6\\4\\0\\1" + mac + socket.inet_aton(sys.argv[2]) + bytes(6)
frame = b"\\xff" * 6 + mac + b"\\x08\\x06" + arp + socket.inet_aton(sys.argv[1])
print("begun", flush=True)
while True:
    begun = time.monotonic()
    for _ in range(100):
        out.send(frame)
    time.sleep(max(0, begun + 0.01 - time.monotonic()))
"""


def test_a_stranger_with_an_address_and_a_flood(three: ThreeNodes) -> None:
    """A machine on the segment that has an address of the pool: no node takes the address while it
    has, and the condition names its MAC address. Ten thousand questions a second lose no request,
    nor does a pod that claims an address of the cluster as often, on its own segment.
    """
    wait_until("the Service has addresses", lambda: three.addresses("web") == [*FIRST], 60)
    taken = "192.0.2.207"
    stranger = three.neighbour("stranger", 77, f"{taken}/24")
    three.add_service("late", 5, loadBalancerIP=taken)
    wait_until("it has it", lambda: taken in three.addresses("late"), 60)

    def conflict() -> bool:
        return any(taken in three.status(node).address_conflicts for node in range(3))

    wait_until("the stranger is named", conflict, 60)
    stranger.ip(f"address delete {taken}/24 dev eth0")
    wait_until(
        "an ARP request for the address is answered", lambda: three.answers(taken, again=True), 60
    )
    for host, sender in ((stranger, "192.0.2.77"), (three.pods[0], FIRST[0])):
        words = [*host.enter, sys.executable, "-IS", "-c", FLOOD, FIRST[0], sender]
        flood = three.lab.keep_ready(subprocess.Popen(words, text=True, stdout=subprocess.PIPE))
        assert [three.answers(FIRST[0], again=True) for _ in range(20)] == [True] * 20
        flood.kill()
    assert not any(FIRST[0] in three.status(node).address_conflicts for node in range(3))


def test_a_policy_local_service_and_a_node_that_takes_no_part(three: ThreeNodes) -> None:
    """The node with an endpoint answers for it. An agent without the option leaves neither program
    nor map, the others take its addresses; `cleanup` removes what one with the option has left.
    """
    three.add_service("local", 10, among=("two",), externalTrafficPolicy="Local")
    wait_until("it has an address", lambda: bool(three.addresses("local")), 60)
    (local, _) = three.addresses("local")
    assert three.wait_for_owner(local) == NAMES.index("two")
    assert three.asks(local, again=True) == "pod-two"
    pins = three.agents[0].paths.state / "devices" / "answer"
    assert [*pins.iterdir()]
    three.take_no_part(0)
    assert not [*pins.iterdir()]
    assert not [*three.agents[0].paths.state.rglob("answered")]
    three.wait_for_owner(FIRST[0], (1, 2))
    wait_until("requests are served", lambda: three.answers(FIRST[0], again=True), 60)
    three.clean_up(1)
    assert three.answers(local, again=True) is False
