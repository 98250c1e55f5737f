# SPDX-License-Identifier: Apache-2.0
"""Whether conntrack looks at the windows of TCP, and what forged segments do in both cases.

The forger knows addresses and ports of a client's connection to a NodePort, and sends from its
place. The numbers of its segments are half a number space away from those of the connection.
"""

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from ebpflb import files
from ebpflb.entries.flows import Connection
from ebpflb.kernel.netfilter import conntrack, nft
from ebpflb.kernel.netfilter.table import TABLE
from ebpflb.kernel.node.sysctls import LIBERAL, NETFILTER_SYSCTLS
from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from tests.kernel.node import nodes
from tests.kit import firewall, flood, needs
from tests.kit.cluster import NODEPORT, ServingOutside, serving_outside
from tests.kit.parameters import families
from tests.kit.sockets import Socket

AUTO = ("--conntrack-tcp-be-liberal=auto",)
FIN, RST, ACK = 0x01, 0x04, 0x10
ESTABLISHED, CLOSE_WAIT = 3, 5  # TCP_CONNTRACK_*
A_DAY = 24 * 3600
SECONDS = 1.5  # until a rule that appears counts
TCP, TCP_QUICKACK, TCP_REPAIR, TCP_REPAIR_QUEUE, TCP_QUEUE_SEQ = 6, 12, 19, 20, 21
SEND_QUEUE, REPAIR_OFF = 2, -1  # TCP_SEND_QUEUE, TCP_REPAIR_OFF_NO_WP
DROPS = firewall.chain("forward", "filter", "ct state invalid drop")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingOutside]:
    needs.netfilter()
    folder = tmp_path_factory.mktemp("liberal")
    with serving_outside(folder, Engine.NETFILTER, *AUTO) as made:
        yield made


@pytest.fixture
def node(serving: ServingOutside) -> Iterator[ServingOutside]:
    """Enter the namespace of the node, whose conntrack is liberal."""
    with nodes.entered(serving.node.netns):
        serving.serve(serving.web[0])
        wait_until("conntrack is liberal", partial(is_as, liberal=True))
        yield serving


def is_liberal() -> bool:
    return files.says_one(NETFILTER_SYSCTLS / LIBERAL)


def drops() -> bool:
    return nft.has_chain(TABLE, "invalid")


def is_as(*, liberal: bool) -> bool:
    """Whether both are as wanted: conntrack, and the chain that drops."""
    return is_liberal() == liberal and drops() != liberal


def answers(client: Socket) -> bool:
    client.send(b"still here")
    return bool(client.recv(64))


def entry_of(client: Socket) -> Connection | None:
    own = client.getsockname()[1]
    listed = conntrack.connections(lambda protocol, _, port: (protocol, port) == (TCP, NODEPORT))
    return next((entry for entry in listed if entry.original.source_port == own), None)


def forge(node: ServingOutside, client: Socket, flags: int) -> None:
    """Send a segment with these flags, a number far above the window, in the client's name."""
    client.setsockopt(TCP, TCP_QUICKACK, 1)  # no acknowledgment comes later
    client.setsockopt(TCP, TCP_REPAIR, 1)
    client.setsockopt(TCP, TCP_REPAIR_QUEUE, SEND_QUEUE)
    number = client.getsockopt(TCP, TCP_QUEUE_SEQ)
    client.setsockopt(TCP, TCP_REPAIR, REPAIR_OFF)
    (source, port, *_), (host, *_) = client.getsockname(), client.getpeername()
    words = host, NODEPORT, source, port, flags, (number + (1 << 30)) % (1 << 32)
    node.outside.python(Path(flood.__file__), "one", *map(str, words)).wait(60)


def test_it_follows_the_rules(node: ServingOutside) -> None:
    """A rule for invalid packets that appears is noticed at once, and so is its end. Connections
    go on, through a restart and without the option too; a restart changes nothing.
    """
    client = node.connection()
    with firewall.rules(node.node, DROPS):
        wait_until("segments are dropped again", partial(is_as, liberal=False), SECONDS)
        assert answers(client)
        state = node.ebpflb("status", "-o", "json").stdout
        assert "asks for ct state invalid" in json.loads(state)["conntrack_liberal"]
    wait_until("conntrack is liberal again", partial(is_as, liberal=True))
    assert answers(client)
    node.agent.stop(signal.SIGKILL)
    assert is_as(liberal=True)
    for options, liberal in ((AUTO, True), ((), False), (AUTO, True)):
        node.agent.stop()
        node.agent.options = options
        node.agent.start()
        wait_until("it is as wanted", partial(is_as, liberal=liberal))
        assert answers(client)
    client.close()


@contextmanager
def strict_rules(node: ServingOutside, client: Socket) -> Iterator[None]:
    """Have conntrack look at windows, and count the forger's segments after it."""
    port = client.getsockname()[1]
    match = f"tcp sport {port} tcp flags & (fin | rst) != 0 counter name forged"
    text = f"counter forged {{ }}\n{firewall.chain('prerouting', '-150', match)}"
    with firewall.rules(node.node, f"{text}\n{DROPS}"):
        wait_until("the rules count", partial(is_as, liberal=False))
        yield


def has_arrived() -> bool:
    said = json.loads(nodes.run("nft", "-j", "list", "counter", "inet", "firewall", "forged"))
    return bool(said["nftables"][-1]["counter"]["packets"])


class Left(NamedTuple):
    """State and possible timeouts that a forged segment leaves; both after the next exchange."""

    state: int
    seconds: tuple[int, ...]
    then: int
    then_seconds: int


UNCHANGED = Left(ESTABLISHED, (A_DAY,), ESTABLISHED, A_DAY)
CASES = {
    "strict RST": (RST, True, UNCHANGED),
    "strict FIN": (FIN | ACK, True, UNCHANGED),
    "liberal RST": (RST, False, Left(ESTABLISHED, (10, 300), ESTABLISHED, A_DAY)),
    "liberal FIN": (FIN | ACK, False, Left(CLOSE_WAIT, (3600,), CLOSE_WAIT, 3600)),
}


@families
@pytest.mark.parametrize(("flags", "strict", "left"), CASES.values(), ids=CASES)
def test_a_forged_segment(
    node: ServingOutside, flags: int, strict: bool, left: Left, v6: bool
) -> None:
    """A connection goes on whatever is forged. A strict conntrack leaves its entry alone. In a
    liberal one a RST shortens it until the next segment: to the 10 s of a closed connection, or on
    6.12 to the 5 minutes of data that nobody has acknowledged. A FIN, which the endpoint answers,
    shortens it to the hour of a half-closed connection.
    """
    with ExitStack() as stack:
        client = stack.enter_context(closing(node.connection(v6=v6)))
        if strict:
            stack.enter_context(strict_rules(node, client))
        forge(node, client, flags)
        if strict:
            wait_until("the segment has arrived", has_arrived)
        wait_until("its entry is as expected", partial(is_left, client, left.state, *left.seconds))
        assert answers(client)
        assert is_left(client, left.then, left.then_seconds)


def is_left(client: Socket, state: int, *seconds: int) -> bool:
    """Whether the connection's entry is so; its timeout may be less by what the test has taken."""
    found = entry_of(client)
    assert found
    is_timed = any(most - 60 < found.seconds <= most for most in seconds)
    return is_timed and found.tcp_state == state
