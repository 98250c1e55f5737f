# SPDX-License-Identifier: Apache-2.0
"""Masquerade ports do not run out, and are not used again while their backend remembers the last
connection.
"""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.model.packet_path import Engine
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
