# SPDX-License-Identifier: Apache-2.0
"""Two nodes, with an agent each or only near, endpoints, and clients without socket hooks.

    near     hooked, unhooked: clients; here, twin: endpoints
    far      there: an endpoint
    outside  a client beyond the router, which routes service addresses to near

The node's socket hooks do not see the sockets of unhooked and twin. The endpoints answer on port
TARGET of TCP and UDP with their names.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab import cni, manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.manifests import Manifest
from ebpflb.model.packet_path import Engine
from ebpflb.model.services import Protocol
from tests.kernel.node import nodes
from tests.kit import needs, pod_networks, requests
from tests.kit.lab_cluster import PORT, TARGET, LabCluster, started
from tests.kit.sockets import Socket

ENGINES = list(Engine)
CLUSTER_CIDR = ("--cluster-cidr", ",".join(cni.NETWORKS))
SERVICE_NETWORKS = ("10.96.0.0/16", "fd00:96::/64", "203.0.113.0/24", "fd03:113::/64")


def require(engine: Engine, network: cni.Cni | None = None) -> None:
    """Skip the tests of an engine that this kernel lacks; tests of the other engine run.

    Pods of one bridge, the default without ``network``, need br_netfilter with netfilter
    (bridged_pods).
    """
    if engine is not Engine.NETFILTER:
        return
    needs.netfilter()
    if not isinstance(network, pod_networks.Routed) and not Path("/proc/sys/net/bridge").exists():
        pytest.skip("this kernel is without br_netfilter")


NO_CONDITIONS: Mapping[str, bool] = {}


class Topology(LabCluster):
    """The nodes, their pods and the client beyond the router; no agent serves them yet."""

    def __init__(self, lab: Lab, folder: Path, network: cni.Cni | None) -> None:
        super().__init__(lab, folder)
        self.near, self.far = lab.node("near", 1, network), lab.node("far", 2, network)
        lab.join(self.near, self.far)
        self.hooked = lab.pod(self.near, "hooked", 2)
        self.unhooked = lab.pod(self.near, "unhooked", 3, hooked=False)
        self.here = lab.pod(self.near, "here", 11)
        self.twin = lab.pod(self.near, "twin", 12, hooked=False)
        self.there = lab.pod(self.far, "there", 11)
        self.outside = lab.outside("outside", 1)
        self.places = {self.there: self.far.name, self.outside: "elsewhere"}  # else the near node
        for network_of_services in SERVICE_NETWORKS:
            lab.router.lead(network_of_services, address(self.near, network_of_services))
        for pod in (self.here, self.twin, self.there):
            self.start_program(pod, "serve", pod.name, str(TARGET))

    def endpoints(self, *pods: Host, v6: bool = False, **conditions: bool) -> list[Manifest]:
        """Return the pods as endpoints of one family; ``outside`` is on no node."""
        return [
            manifests.endpoint(
                pod.v6 if v6 else pod.v4,
                node=self.places.get(pod, self.near.name),
                target=pod.name,
                **conditions,
            )
            for pod in pods
        ]

    def connected(self, who: str, to: tuple[str, int]) -> Socket:
        """Return an open connection of the host of this name, whose backend has answered."""
        return requests.connected(self.sockets(getattr(self, who)), *to)[0]

    def is_served(self, host: Host, where: tuple[str, int], seconds: float = 0.3) -> bool:
        """Whether an endpoint answers a host's datagram within this many seconds."""
        with requests.udp_socket(self.sockets(host), where[0]) as client:
            client.settimeout(seconds)
            try:
                return bool(requests.exchange(client, *where).name)
            except (TimeoutError, ConnectionRefusedError):
                return False

    def until_served(self, host: Host, where: tuple[str, int]) -> None:
        wait_until(f"{host.name} is served", lambda: self.is_served(host, where))

    def delete_connections(self, which: Callable[[Protocol], bool] = lambda _: True) -> None:
        """Delete both nodes' conntrack entries of the protocols for which ``which`` is true."""
        for node in (self.near, self.far):
            with nodes.entered(node.netns):
                entries = conntrack.connections(lambda *_: True)
                conntrack.delete(entry for entry in entries if which(entry.protocol))

    def service(
        self,
        name: str,
        number: int,
        *pods: Host,
        conditions: Mapping[str, bool] = NO_CONDITIONS,
        **spec: Any,
    ) -> list[Manifest]:
        """Return a Service with a frontend of each kind (``Frontends``), and endpoints that are
        ready, or in this condition.
        """
        frontends = Frontends(number)
        named = [{"name": p, "port": TARGET, "protocol": p.upper()} for p in ("tcp", "udp")]
        ports = [{**port, "port": PORT, "nodePort": frontends.nodeport} for port in named]
        every: dict[str, Any] = {"type": "LoadBalancer", "externalIPs": frontends.external}
        every["ingress"] = frontends.balancer
        return [
            manifests.service(name, frontends.cluster, ports, **every | spec),
            *(
                manifests.endpoint_slice(
                    name, family, self.endpoints(*pods, v6=family == "IPv6", **conditions), named
                )
                for family in ("IPv4", "IPv6")
            ),
        ]

    def one_port(
        self, name: str, number: int, pod: Host, target: int, protocol: str = "TCP"
    ) -> list[Manifest]:
        """Return a NodePort Service with one port, whose endpoint listens on this target port."""
        frontends = Frontends(number)
        named = [{"name": protocol.lower(), "port": target, "protocol": protocol}]
        ports = [{**named[0], "port": PORT, "nodePort": frontends.nodeport}]
        return [
            manifests.service(name, frontends.cluster, ports, type="NodePort"),
            manifests.endpoint_slice(name, "IPv4", self.endpoints(pod), named),
            manifests.endpoint_slice(name, "IPv6", self.endpoints(pod, v6=True), named),
        ]


class TwoNodes(Topology):
    """Two nodes; both agents get the same manifests."""

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        network: cni.Cni | None,
        *options: str,
        engine: Engine = Engine.FLOWS,
        far_agent: bool = True,
    ) -> None:
        """``far_agent``: also far has an agent, which near's translated packets only pass."""
        super().__init__(lab, folder, network)
        self.engine = engine
        self.add_agent(self.near, *options)
        if far_agent:
            self.add_agent(self.far, *options)
        else:
            self.without_agent.append(self.far)

    def delete_all_flows(self) -> None:
        for table in ("tcp_flows", "other_flows"):
            self.delete_flows(table)

    def delete_flows(self, table: str) -> None:
        """Delete flows, so that a new socket with the port of a former one does not continue its
        flow.
        """
        for agent in self.agents:
            flows = self.maps_of(agent)[table]
            flows.delete([packet for packet, _ in flows.items()])
            if table == "other_flows":
                choices = self.maps_of(agent)["udp_choices"]
                choices.delete([packet for packet, _ in choices.items()])
        if self.engine is Engine.NETFILTER:
            of_tcp = table == "tcp_flows"
            self.delete_connections(lambda protocol: (protocol is Protocol.TCP) == of_tcp)


Change = Callable[[TwoNodes], None]


class Frontends:
    """The frontends of the service of this number: addresses of both families, and a NodePort."""

    def __init__(self, number: int) -> None:
        self.cluster = [f"10.96.0.{number}", f"fd00:96::{number}"]
        self.external = [f"203.0.113.{number}", f"fd03:113::{number}"]
        self.balancer = [f"203.0.113.{100 + number}", f"fd03:113::{100 + number}"]
        self.nodeport = 30000 + number

    def to(self, kind: str, node: Host, *, v6: bool = False) -> tuple[str, int]:
        """Return address and port of a kind of frontend: cluster, external, balancer, nodeport."""
        if kind == "nodeport":
            return (node.v6 if v6 else node.v4), self.nodeport
        addresses: list[str] = getattr(self, kind)
        return addresses[v6], PORT


def address(host: Host, like: str) -> str:
    """Return the host's address of the same family."""
    return host.v6 if ":" in like else host.v4


@contextmanager
def running(
    folder: Path,
    *options: str,
    network: cni.Cni | None = None,
    engine: Engine = Engine.FLOWS,
    prepare: Change | None = None,
    far_agent: bool = True,
) -> Iterator[TwoNodes]:
    """Yield two nodes, prepared by ``prepare``, with running agents; everything is removed
    afterwards. Skip the test if the kernel lacks the engine, or the network's devices.
    """
    require(engine, network)

    def make(lab: Lab) -> TwoNodes:
        with needs.devices():
            how: dict[str, Any] = {"engine": engine, "far_agent": far_agent}
            made = TwoNodes(lab, folder, network, *options, **how)
        if prepare:
            prepare(made)
        return made

    with started(make) as made:
        yield made


def fixture(
    *options: str,
    engines: Iterable[Engine] = ENGINES,
    prepare: Change | None = None,
    publish: Change | None = None,
) -> Any:
    """Return a fixture ``two`` for a file: near's agent has these options, for each engine.

    The nodes are prepared before the agent starts, and something is published afterwards.
    """

    @pytest.fixture(scope="module", params=engines, ids=str)
    def two(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[TwoNodes]:
        how: dict[str, Any] = {"engine": request.param, "prepare": prepare, "far_agent": False}
        with running(tmp_path_factory.mktemp("two"), *CLUSTER_CIDR, *options, **how) as made:
            if publish:
                publish(made)
            yield made

    return two


def web_on_far(two: TwoNodes) -> None:
    """Publish a Service whose only endpoint is on the far node: clients outside are masqueraded."""
    two.publish(two.service("web", 10, two.there))
