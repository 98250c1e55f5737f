# SPDX-License-Identifier: Apache-2.0
"""SCTP where netfilter cannot translate it: the flow tables do, beside netfilter."""

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from tests.kit import two_nodes
from tests.kit.two_nodes import Frontends, TwoNodes

SCTP, TARGET = 132, 8080
FRONTENDS = Frontends(20)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[TwoNodes]:
    """Nodes whose agents find that netfilter cannot translate SCTP."""
    lines = "from ebpflb.kernel.netfilter import probe", "probe.can_translate_sctp = lambda: False"
    (tmp_path / "sitecustomize.py").write_text("\n".join(lines))

    def prepare(two: TwoNodes) -> None:
        for agent in two.agents:
            agent.under = ("env", f"PYTHONPATH={tmp_path}")

    how: Any = {"engine": Engine.NETFILTER, "prepare": prepare, "far_agent": False}
    with two_nodes.running(tmp_path / "nodes", *two_nodes.CLUSTER_CIDR, **how) as made:
        yield made


def test_an_association(two: TwoNodes) -> None:
    """It opens once all devices have the program at egress; its answer is from the frontend."""
    to, port = FRONTENDS.to("nodeport", two.near)
    init, init_ack = (bytes([kind, 0, 0, 20]) + bytes(15) + b"\1" for kind in (1, 2))
    two.publish(two.one_port("sctp", 20, two.there, TARGET, "SCTP"))
    client = two.sockets(two.outside).open(socket.AF_INET, socket.SOCK_RAW, SCTP)
    endpoint = two.sockets(two.there).open(socket.AF_INET, socket.SOCK_RAW, SCTP)
    client.settimeout(0.5)
    endpoint.settimeout(0.5)

    def is_opened() -> bool:
        client.sendto(struct.pack(">HHII", 5555, port, 0, 0) + init, (to, 0))
        try:
            asked, (source, _) = endpoint.recvfrom(99)
            asker, at = struct.unpack_from(">HH", asked, 20)
            endpoint.sendto(struct.pack(">HHII", at, asker, 1, 0) + init_ack, (source, 0))
            answer, (sender, _) = client.recvfrom(99)
        except TimeoutError:
            return False
        return (sender, struct.unpack_from(">HH", answer, 20)) == (to, (port, 5555))

    with client, endpoint:
        wait_until("the association is opened", is_opened)
