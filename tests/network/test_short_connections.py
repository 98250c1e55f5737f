# SPDX-License-Identifier: Apache-2.0
"""Masquerade ports are not used again while their backend remembers the last connection."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit import short_connections, two_nodes
from tests.kit.lab_cluster import TARGET
from tests.kit.two_nodes import CLUSTER_CIDR, ENGINES, Frontends, TwoNodes

PROGRAM = Path(short_connections.__file__)
FRONTENDS = Frontends(10)
PORTS = ("--masquerade-ports", "40000-45999")
CLOSING = TARGET + 1  # where ``there`` closes connections first


@pytest.fixture(params=ENGINES, ids=str)
def closing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TwoNodes]:
    """Enough ports for all, and a server that closes connections first, so it is in TIME_WAIT."""
    two_nodes.require(request.param)
    with two_nodes.running(tmp_path, *CLUSTER_CIDR, *PORTS, engine=request.param) as made:
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
    words = (PROGRAM, "ask", "3000", *places)
    asking = closing.lab.keep(closing.outside.python(*words, stdout=subprocess.PIPE))
    said, _ = asking.communicate(timeout=300)
    assert int(said) == 0
