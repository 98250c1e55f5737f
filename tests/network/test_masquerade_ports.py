# SPDX-License-Identifier: Apache-2.0
"""Masquerade ports do not run out, and are not used again while their backend remembers the last
connection.
"""

import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.sockets import Socket
from ebpflb.model.packet_path import Engine
from ebpflb.plan.flow_entries import STREAM_AFTER, FlowKind
from tests.kit import short_connections, two_nodes
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import families
from tests.kit.two_nodes import CLUSTER_CIDR, ENGINES, Frontends, TwoNodes

PROGRAM = Path(short_connections.__file__)
FRONTENDS = Frontends(10)
PORTS = 16  # as many as are tried for a flow (bpf/engine/flows/source_port.h)


FEW_PORTS = ("--masquerade-ports", f"40000-{40000 + PORTS - 1}")
two = two_nodes.fixture(*FEW_PORTS, engines=[Engine.FLOWS], publish=two_nodes.web_on_far)


@pytest.fixture(scope="module", params=["agents serve", "agents are dead"])
def agents(two: TwoNodes, request: pytest.FixtureRequest) -> Iterator[None]:
    """Without agents nothing sweeps."""
    dead = two.agents if request.param == "agents are dead" else []
    for agent in dead:
        agent.stop(signal.SIGKILL)
    yield
    for agent in dead:
        agent.start()


@pytest.mark.usefixtures("agents")
@pytest.mark.parametrize("protocol", ["udp", "tcp"])
@families
def test_ports_do_not_run_out(two: TwoNodes, protocol: str, v6: bool) -> None:
    """Far more clients than ports, each with one question, are all answered."""
    before = two.verdict("ports_exhausted")
    to = FRONTENDS.to("nodeport", two.near, v6=v6)
    answers = two.request(two.outside, protocol, *to, 6 * PORTS)
    assert not answers["errors"]
    assert answers["names"] == {"there": 6 * PORTS}
    assert two.verdict("ports_exhausted") == before


@pytest.mark.usefixtures("agents")
def test_unanswered_connections_hold_no_port(two: TwoNodes) -> None:
    """Far more connections than ports that the backend does not answer keep no other client out."""
    to = FRONTENDS.to("nodeport", two.near)
    before = two.verdict("ports_exhausted")
    two.far.ip(f"rule add pref 1 to {two.there.v4} blackhole")
    try:
        opening = two.outside.python(PROGRAM, "syn", str(6 * PORTS), f"{to[0]}:{to[1]}")
        assert two.lab.keep(opening).wait() == 0
    finally:
        two.far.ip(f"rule del pref 1 to {two.there.v4} blackhole")
    answers = two.request(two.outside, "tcp", *to, 2 * PORTS)
    assert not answers["errors"]
    assert two.verdict("ports_exhausted") == before


@pytest.mark.extended
def test_open_connections_keep_their_ports(two: TwoNodes) -> None:
    """However many others come, connections that are open go on."""
    to = FRONTENDS.to("nodeport", two.near)
    client = two.sockets(two.outside)
    opened = []
    for _ in range(PORTS // 4):
        stream = client.open(AF_INET, SOCK_STREAM)
        stream.connect(to)
        stream.recv(64)
        opened.append(stream)
    answers = two.request(two.outside, "tcp", *to, 6 * PORTS)
    assert not answers["errors"]
    for stream in opened:
        stream.send(b"still there?")
        assert stream.recv(64) == b"still there?"
        stream.close()


def all_are_streams(two: TwoNodes, opened: list[Socket]) -> bool:
    """Whether each of these UDP sockets is in use for so long that its flow keeps its port."""
    for each in opened:
        each.send(b"?")
        each.recv(64)
    flows = [flow for _, flow in two.maps["other_flows"].items() if flow.kind == FlowKind.UN_SNAT]
    lasted = sorted(flow.last_seen - flow.created for flow in flows)
    return bool(lasted[-len(opened)] > STREAM_AFTER * 1_000_000_000)


@pytest.mark.usefixtures("agents")
def test_one_port_that_no_open_flow_has_serves_all_others(two: TwoNodes) -> None:
    """With all ports busy no query is dropped while one of the flows is idle."""
    to, before = FRONTENDS.to("nodeport", two.near), two.verdict("ports_exhausted")
    client = two.sockets(two.outside)
    two.delete_flows("other_flows")
    with ExitStack() as stack:
        opened = [stack.enter_context(client.open(AF_INET, SOCK_DGRAM)) for _ in range(PORTS - 1)]
        for each in opened:
            each.connect(to)
        wait_until("all are streams", lambda: all_are_streams(two, opened))
        answers = two.request(two.outside, "udp", *to, 2 * PORTS)
        assert answers["names"] == {"there": 2 * PORTS}
        assert not answers["errors"]
        for each in opened:
            each.send(b"still there?")
            assert b"still there?" in each.recv(64)
    assert two.verdict("ports_exhausted") == before


MANY_PORTS = ("--masquerade-ports", "40000-45999")
CLOSING = TARGET + 1  # where ``there`` closes connections first


@pytest.fixture(params=ENGINES, ids=str)
def closing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TwoNodes]:
    """Enough ports for all, and a server that closes connections first, so it is in TIME_WAIT."""
    with two_nodes.running(tmp_path, *CLUSTER_CIDR, *MANY_PORTS, engine=request.param) as made:
        service = made.service("web", 10, made.there)
        for each in service[1:]:
            for port in each["ports"]:
                port["port"] = CLOSING
        made.publish(service)
        server = made.there.python(PROGRAM, "serve", str(CLOSING), stdout=subprocess.PIPE)
        assert made.lab.keep(server).stdout
        server.stdout.readline()  # type: ignore[union-attr]
        made.there.sysctl("net.ipv4.tcp_timestamps", 1)
        made.outside.sysctl("net.ipv4.tcp_timestamps", 1)
        yield made


@pytest.mark.extended
def test_short_connections_do_not_stall(closing: TwoNodes) -> None:
    """No SYN comes to a backend from a port of a connection that it still has in TIME_WAIT.

    A client's timestamps begin elsewhere for each address that it connects to; behind a masquerade
    they all come from one address, and the backend takes those that went back for old packets.
    """
    kinds = ("nodeport", "external", "balancer")
    places = ["{}:{}".format(*FRONTENDS.to(kind, closing.near)) for kind in kinds]
    words = ("ask", "3000", *places)
    asking = closing.lab.keep(closing.outside.python(PROGRAM, *words, stdout=subprocess.PIPE))
    said, _ = asking.communicate(timeout=300)
    assert int(said) == 0
