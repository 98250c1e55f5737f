# SPDX-License-Identifier: Apache-2.0
"""With --fast-forward: endpoints on this node and on another one, beyond a tunnel.

Established flows pass no chain of netfilter on the node; what the stack has to answer it answers.
On the engine netfilter, where the kernel has a flowtable, that is the kernel's own.
"""

import errno
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.lab import cni
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Lab
from ebpflb.model.packet_path import Engine
from ebpflb.node.flowtable_probe import flowtable_obstacle
from ebpflb.serve import status
from tests.kit import requests
from tests.kit.lab_cluster import TARGET, LabCluster, started
from tests.kit.requests import Send
from tests.kit.two_nodes import ENGINES, require
from tests.network.test_reply_paths import (
    NARROW,
    OPTIONS,
    PMTUDISC_DO,
    SERVED,
    TwoPlaces,
    conversation,
    endpoints,
    error_after,
    families,
)

COUNTED = """
table inet counted {
    chain forward {
        type filter hook forward priority 0;
        meta l4proto { tcp, udp } counter
    }
}
"""
DATAGRAMS, LARGE = 300, 16 << 20
TRIES = 3


class FastForwarding(TwoPlaces):
    """Routes lead everything by the first uplink, as usual."""

    def __init__(self, lab: Lab, folder: Path, engine: Engine) -> None:
        LabCluster.__init__(self, lab, folder)
        self.engine = engine
        self.node = lab.node("node", 1, cni.Overlay())
        far = lab.node("far", 2, cni.Overlay())
        lab.join(self.node, far)
        self.pod, self.there = lab.pod(self.node, "web-1", 11), lab.pod(far, "there", 11)
        self.outside = lab.outside("outside", 1)
        self.agent = self.add_agent(self.node, f"--packet-path={engine}", "--fast-forward")
        for pod in (self.pod, self.there):
            self.start_program(pod, "serve", pod.name, str(TARGET))
        self.outside.ip("link set eth0 mtu 1450")  # as beyond the tunnel
        self.node.nft(COUNTED)

    def forwarded(self) -> int:
        """TCP segments and datagrams that passed FORWARD."""
        command = [*self.node.enter, "nft", "-j", "list", "table", "inet", "counted"]
        listed = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        (rule,) = (each["rule"] for each in listed["nftables"] if "rule" in each)
        return sum(e["counter"]["packets"] for e in rule["expr"] if "counter" in e)


@pytest.fixture(scope="module", params=ENGINES)
def places(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FastForwarding]:
    engine: Engine = request.param
    require(engine, cni.Overlay())
    if engine is Engine.NETFILTER and (missing := flowtable_obstacle()):
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("forwarding")
    with started(lambda lab: FastForwarding(lab, folder, engine)) as made:
        made.serve_both()
        yield made


@families
@endpoints
def test_requests(places: FastForwarding, name: str, v6: bool) -> None:
    """They are answered, in every protocol, in fragments too."""
    where = places.to(name, SERVED, v6=v6)
    sends: list[Send] = [requests.tcp, requests.udp, requests.connected_udp, requests.fragmented]
    for send in sends:
        assert send(places.sockets(places.outside), *where).name == name


@families
@endpoints
def test_large_transfers(places: FastForwarding, name: str, v6: bool) -> None:
    """A megabyte goes and comes back unchanged; openings, ends and few others pass the stack."""
    before = places.forwarded()
    assert places.echo(places.outside, *places.to(name, SERVED, v6=v6), size=LARGE) == name
    assert places.forwarded() - before < LARGE // 1500 // 10
    wait_until("its entries have ended", lambda: ended(places))


def ended(places: FastForwarding) -> bool:
    """Whether every connection's entries say that both sides have closed."""
    entries = [flow for _, flow in places.maps["tcp_flows"].items()]
    return all(flow.flags & {"fin", "rst"} for flow in entries)


@families
@endpoints
def test_most_datagrams(places: FastForwarding, name: str, v6: bool) -> None:
    """Those of an answered flow are not seen in FORWARD, in either direction."""
    with conversation(places, name, v6=v6) as (client, server):
        before = places.forwarded()
        for _ in range(DATAGRAMS):
            client.send(b"?")
            assert server.recv(64) == b"?"
            server.send(b"!")
            assert client.recv(64) == b"!"
        assert places.forwarded() - before < DATAGRAMS


@families
@endpoints
def test_bottleneck(places: FastForwarding, name: str, v6: bool) -> None:
    """Where a router beyond takes less its ICMP errors reach the endpoint."""
    places.lab.router.narrow(NARROW)
    try:
        assert places.echo(places.outside, *places.to(name, SERVED, v6=v6)) == name
        level, _, _, discover = OPTIONS[v6]
        with conversation(places, name, v6=v6) as (client, server):
            server.setsockopt(level, discover, PMTUDISC_DO)
            assert error_after(server, client, bytes(NARROW)) == errno.EMSGSIZE
    finally:
        places.lab.router.narrow()


@families
@endpoints
@pytest.mark.parametrize("beyond", [0, 1], ids=["node", "router"])
def test_time_exceeded_of_a_reply(places: FastForwarding, name: str, beyond: int, v6: bool) -> None:
    """Whether its last hop is this node or a router beyond: the endpoint is told."""
    level, _, ttl, _ = OPTIONS[v6]
    hops = (2 if name == "there" else 1) + beyond
    with conversation(places, name, v6=v6) as (client, server):
        server.setsockopt(level, ttl, hops)
        assert error_after(server, client, b"too far") == errno.EHOSTUNREACH


@families
@endpoints
@pytest.mark.parametrize("hops", [1, 2], ids=["router", "node"])
def test_time_exceeded_of_a_request(places: FastForwarding, name: str, hops: int, v6: bool) -> None:
    """Whether its last hop is a router before this node or the node: the client is told."""
    level, _, ttl, _ = OPTIONS[v6]
    with conversation(places, name, v6=v6) as (client, server):
        client.setsockopt(level, ttl, hops)
        assert error_after(client, server, b"too far") == errno.EHOSTUNREACH


@families
def test_narrow_device(places: FastForwarding, v6: bool) -> None:
    """An endpoint whose reply is too long for the device is told so by the stack."""
    level, _, _, discover = OPTIONS[v6]
    places.node.ip(f"link set eth0 mtu {NARROW}")
    try:
        with conversation(places, "web-1", v6=v6) as (client, server):
            server.setsockopt(level, discover, PMTUDISC_DO)
            assert error_after(server, client, bytes(NARROW)) == errno.EMSGSIZE
            assert places.echo(places.outside, *places.to("web-1", SERVED, v6=v6)) == "web-1"
    finally:
        places.node.ip("link set eth0 mtu 1500")


def test_restart(places: FastForwarding) -> None:
    """A new agent's programs go on with the flows."""
    with conversation(places, "web-1", v6=False) as (client, server):
        places.agent.stop()
        places.agent.start()
        client.send(b"?")
        assert server.recv(64) == b"?"
        server.send(b"!")
        assert client.recv(64) == b"!"


def test_status(places: FastForwarding) -> None:
    """It says that the option is in force."""
    said = status.read(places.agent.paths)
    assert said and said.fast_forward
    assert places.engine is Engine.FLOWS or (said.flowtable or "").startswith("in force")


@families
@endpoints
def test_replies_leave_where_requests_came_in(places: FastForwarding, name: str, v6: bool) -> None:
    """Once the endpoint has answered, whatever routing rules say of its address. One datagram in
    8.6 s goes to the stack, and is lost there.
    """
    if places.engine is Engine.NETFILTER:
        pytest.skip("the kernel's flowtable asks the routes when a flow enters it")
    pod = places.pod_of(name)
    rule = f"rule {{}} from {pod.v6 if v6 else pod.v4} blackhole priority 9"
    with conversation(places, name, v6=v6) as (client, server):
        places.node.ip(rule.format("add"), v6=v6)
        try:
            for _ in range(TRIES):
                server.send(b"!")
            assert client.recv(64) == b"!"
        finally:
            places.node.ip(rule.format("del"), v6=v6)
