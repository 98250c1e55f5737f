# SPDX-License-Identifier: Apache-2.0
"""Who does not see a connection's packets cannot end it, beside the kernel's conntrack."""

from contextlib import suppress
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from struct import pack

import pytest

from ebpflb.entries.flows import FlowKind, Timeouts, gather, state
from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from ebpflb.model.services import Protocol
from tests.kernel.node import nodes
from tests.kit import flood
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import both_engines, families
from tests.kit.requests import lives
from tests.kit.two_nodes import Frontends, TwoNodes

FLOOD = Path(flood.__file__)
FRONTENDS = Frontends(10)
FIN, SYN, RST, ACK = 1, 2, 4, 16
LONG, SHORT = 3600, 200  # seconds: an open connection is kept longer, one that has ended is not
ABORT = pack("ii", 1, 0)

pytestmark = both_engines


@pytest.fixture(autouse=True)
def afresh(two: TwoNodes) -> None:
    two.publish(two.service("web", 10, two.there))
    two.delete_flows("tcp_flows")
    with nodes.entered(two.near.netns):
        conntrack.delete(list(conntrack.connections(lambda *_: True, Protocol.TCP)))


class Known:
    """The one connection to the NodePort: how long it may be idle, and where its replies go."""

    def __init__(self, two: TwoNodes) -> None:
        if two.engine is Engine.NETFILTER:
            with nodes.entered(two.near.netns):
                found = conntrack.connections(lambda _, __, port: port == FRONTENDS.nodeport)
                (entry,) = found
            self.timeout = entry.seconds
            self.masquerade = str(entry.reply.destination), str(entry.reply.destination_port)
            return
        entries = dict(two.maps["tcp_flows"].items())
        (snat,) = [each for each in entries.items() if each[1].kind == FlowKind.SNAT]
        is_in = state(Protocol.TCP, gather(*snat, entries.get).values())
        self.timeout = Timeouts().seconds[Protocol.TCP][is_in]
        self.masquerade = str(snat[1].address), str(snat[1].port)


def wait_until_open(two: TwoNodes) -> None:
    """conntrack waits for the last acknowledgment."""
    wait_until("all data is acknowledged", lambda: Known(two).timeout > LONG)


def end_of(two: TwoNodes, v6: bool) -> str:
    return two.there.v6 if v6 else two.there.v4


@pytest.mark.extended
@families
@pytest.mark.parametrize("flags", [FIN | ACK, RST, RST | ACK], ids=["fin", "rst", "rst ack"])
@pytest.mark.parametrize("side", ["client", "backend"])
def test_a_forged_end_leaves_the_long_timeout(
    two: TwoNodes, side: str, flags: int, v6: bool
) -> None:
    """A FIN or RST and a SYN in the name of one side, with numbers that were guessed wrong."""
    to = FRONTENDS.to("nodeport", two.near, v6=v6)
    with two.connected("outside", to) as client:
        wait_until_open(two)
        if side == "client":
            sender, ends = two.outside, (to[0], str(to[1]), *map(str, client.getsockname()[:2]))
        else:
            sender, ends = two.there, (*Known(two).masquerade, end_of(two, v6), str(TARGET))
        for forged in (flags, SYN, flags) if side == "client" else (flags, flags):
            words = ("one", *ends, str(forged), "12345")
            assert two.lab.keep(sender.python(FLOOD, *words)).wait() == 0
        assert Known(two).timeout > LONG
        assert lives(client)
        wait_until_open(two)


@families
@pytest.mark.parametrize("abort", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "with data unread"])
def test_a_real_end_is_believed(two: TwoNodes, abort: bool, busy: bool, v6: bool) -> None:
    """The client closes or resets, whether or not what the backend sent has been read."""
    to = FRONTENDS.to("nodeport", two.near, v6=v6)
    client = two.connected("outside", to)
    assert lives(client)
    wait_until_open(two)
    if busy:
        client.send(b"x" * 5000)
    if abort:
        client.setsockopt(SOL_SOCKET, SO_LINGER, ABORT)
    with suppress(OSError):
        client.close()
    wait_until("the connection has ended", lambda: Known(two).timeout < SHORT)
