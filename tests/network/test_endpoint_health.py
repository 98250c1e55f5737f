# SPDX-License-Identifier: Apache-2.0
"""Endpoints that do not answer are set aside by what real clients see (docs/endpoint-health.md)."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.packet_path import Engine
from ebpflb.serve import status
from ebpflb.serve.service_page import USED, EndpointRow
from ebpflb.tools import ask
from tests.kit import requests
from tests.kit.cluster import PORT, VIP, VIP6, Cluster, endpoint, web
from tests.kit.lab_cluster import TARGET, started
from tests.kit.sockets import Sockets
from tests.kit.two_nodes import CLUSTER_CIDR, require

PATIENCE = 1.5  # seconds: a client's second SYN leaves after one
NAMES = {"web-1", "web-2", "web-3"}
WAYS = {"silent": "drop", "refuses": "reject with tcp reset"}


class Watched(Cluster):
    """A cluster with three clients in pods, whose sockets the hooks may or may not see."""

    def __init__(self, lab: Lab, folder: Path, engine: Engine, *, hooked: bool) -> None:
        options = "--endpoint-health", "passive", *CLUSTER_CIDR
        super().__init__(lab, folder, *options, engine=engine)
        self.hooked = hooked
        pods = (lab.pod(self.node, f"client-{i}", i, hooked=hooked) for i in (3, 4, 5))
        self.clients = list(pods)


@pytest.fixture(
    scope="module",
    params=[(Engine.FLOWS, True), (Engine.NETFILTER, False), (Engine.FLOWS, False)],
    ids=["sockets", "netfilter", "flows"],
)
def module_cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Watched]:
    """Yield a cluster for sockets, and for packets on each engine."""
    engine, hooked = request.param
    require(engine)
    folder = tmp_path_factory.mktemp("watched")
    with started(lambda lab: Watched(lab, folder, engine, hooked=hooked)) as made:
        yield made


def set_aside(cluster: Watched) -> bool:
    """Whether the agent's status names endpoints that are set aside."""
    published = status.read(cluster.agent.paths)
    return published is None or bool(published.set_aside)


@pytest.fixture
def cluster(module_cluster: Watched) -> Iterator[Watched]:
    """Return the cluster with new endpoints, after each client has reached the Service."""
    made = module_cluster
    made.publish()
    wait_until("none is set aside any more", lambda: not set_aside(made))
    v6 = [endpoint(pod, v6=True) for pod in made.web]
    made.publish(web(*map(endpoint, made.web), v6=v6))
    for client in made.clients:
        for address in (VIP, VIP6):
            requests.tcp(made.sockets(client), address)
    yield made
    for host in (*made.web, *made.clients):
        with suppress(Exception):
            host.nft("delete table inet broken\n")


def break_input(pod: Host, how: str, whose: str = "") -> None:
    """Break connections to the pod's server in this way."""
    rule = f"{whose}tcp dport {TARGET} {how}"
    pod.nft(
        f"table inet broken {{\nchain i {{\ntype filter hook input priority 0; {rule};\n}}\n}}\n"
    )


def attempt(sockets: Sockets, address: str) -> str:
    """Return the endpoint that answers; "" if none does in time."""
    with requests.tcp_socket(sockets, address) as client:
        client.settimeout(PATIENCE)
        try:
            client.connect((address, PORT))
            return str(requests.traffic.read(client.recv(64))[0])
        except OSError:
            return ""


def rows(cluster: Cluster, address: str = VIP) -> list[EndpointRow]:
    """Return the endpoints of the TCP port in this family, as in `ebpflb services get`."""
    ports = ask.service(cluster.agent.paths, "default", "web").ports
    family = "IPv6" if ":" in address else "IPv4"
    (found,) = (it for it in ports if (it.family, it.protocol) == (family, "TCP"))
    return list(found.endpoints)


def used(cluster: Cluster, address: str = VIP) -> set[str]:
    return {row.pod for row in rows(cluster, address) if row.state == USED}


@pytest.mark.parametrize(("way", "address"), [("silent", VIP), ("refuses", VIP6)])
def test_an_endpoint_that_does_not_answer_is_set_aside(
    cluster: Watched, way: str, address: str
) -> None:
    """After three clients failed, only other endpoints are used, until the time of the failed one
    has passed.

    This time grows, so that even a slow machine notices it.
    """
    dead = cluster.web[0]
    others, place = NAMES - {dead.name}, f"[{dead.v6}]" if ":" in address else dead.v4
    break_input(dead, WAYS[way])

    def until(what: str, is_true: Callable[[], bool]) -> None:
        """Wait for a condition while clients keep connecting."""

        def found() -> bool:
            for client in cluster.clients:
                attempt(cluster.sockets(client), address)
            return is_true()

        wait_until(what, found)

    def is_said() -> bool:
        reasons = {row.pod: row.reason for row in rows(cluster, address)}
        return bool(reasons[dead.name].startswith("set aside"))

    to = f"[{address}]:{PORT}" if ":" in address else f"{address}:{PORT}"
    note = f"set aside, as they do not answer this node: {place}:{TARGET}"
    until("it is not used", lambda: used(cluster, address) == others)
    until("its reason is said", is_said)
    until("it is explained", lambda: note in cluster.ebpflb("explain", to).stderr)
    sockets = cluster.sockets(cluster.clients[0])
    until("only others are asked", lambda: {attempt(sockets, address) for _ in range(20)} == others)
    assert f"default/web:tcp {place}:{TARGET} set aside" in cluster.ebpflb("history").stdout
    cluster.logs(f"endpoint {place}:{TARGET} is set aside on this node for 10 s")
    dead.nft("delete table inet broken\n")
    wait_until("it is asked again", lambda: used(cluster, address) == NAMES)


def test_a_denied_pod_is_no_weapon(cluster: Watched) -> None:
    """All failures of a pod that reaches no endpoint count once, until it reaches one.

    On a slow machine others have failed before: entries of Services that are gone stay in the map.
    """
    former = dict(cluster.maps["backend_health"].items())
    denied, *others = cluster.clients
    for pod in cluster.web:
        break_input(pod, "drop", f"ip saddr {denied.v4} ")
    sockets = cluster.sockets(denied)
    for _ in range(3):
        begun = [requests.tcp_socket(sockets, VIP) for _ in range(100)]
        for each in begun:
            each.setblocking(False)
            with suppress(BlockingIOError):
                each.connect((VIP, PORT))
        assert attempt(sockets, VIP) == ""
        for each in begun:
            each.close()
    counted = dict(cluster.maps["backend_health"].items())
    failed = [it.second for key, it in counted.items() if it.first and key not in former]
    assert failed == [0]
    for client in others:
        assert set(requests.backends(cluster.sockets(client), VIP)) == NAMES
    assert used(cluster) == NAMES
