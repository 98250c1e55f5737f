# SPDX-License-Identifier: Apache-2.0
"""The kernel's flowtable with --fast-forward on the engine netfilter.

From their 20th packet on, established connections bypass the stack; the packets that open and end
them do not, and no change of the flowtable breaks a connection. A counter in FORWARD counts the
packets of connections to the service. The client is outside.
"""

import json
import signal
from collections.abc import Callable, Iterator
from socket import SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.kernel.netfilter import flowtable, nft
from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from tests.kernel.node import nodes
from tests.kit import firewall, needs
from tests.kit.cluster import NODEPORT, ServingOutside, serving_outside
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import families
from tests.kit.sockets import Socket

FAST = ("--fast-forward",)
OTHERS_PORT = 30999
EXCHANGES = 20
POLICY = "add chain inet firewall forward { policy drop; }"

both_protocols = pytest.mark.parametrize("kind", [SOCK_STREAM, SOCK_DGRAM], ids=["tcp", "udp"])


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingOutside]:
    """Yield a node with a flowtable."""
    needs.flowtable()
    with serving_outside(tmp_path_factory.mktemp("fast"), Engine.NETFILTER, *FAST) as made:
        yield made


@pytest.fixture
def node(fast: ServingOutside) -> Iterator[ServingOutside]:
    """Enter the node's namespace; packets of the connections are counted."""
    match = f"ct original proto-dst {{ {NODEPORT}, {OTHERS_PORT} }} counter name seen"
    counted = (f"meta l4proto {protocol} {match}" for protocol in ("tcp", "udp"))
    chain = firewall.chain("forward", "filter", *counted)
    rules = firewall.rules(fast.node, f"counter seen {{ }}\n{chain}")
    with nodes.entered(fast.node.netns), rules:
        fast.serve(*fast.web)
        wait_until("the flowtable is there", lambda: flowtable.read(flowtable.TABLE) is not None)
        yield fast


def seen(node: ServingOutside) -> int:
    """Return the packets in FORWARD so far, of connections to the NodePort."""
    said = json.loads(nodes.run("nft", "-j", "list", "counter", "inet", "firewall", "seen"))
    return int(said["nftables"][-1]["counter"]["packets"])


def goes_on(client: Socket) -> bool:
    client.send(b"still here")
    return bool(client.recv(64))


def passes(node: ServingOutside, done: Callable[[], object]) -> int:
    """Return how many packets pass FORWARD while the block runs."""
    before = seen(node)
    done()
    return seen(node) - before


def is_forwarded(node: ServingOutside, client: Socket) -> bool:
    """Whether the connection continues without the stack."""
    return passes(node, lambda: goes_on(client)) == 0


def exchange(client: Socket) -> None:
    for _ in range(EXCHANGES):
        assert goes_on(client)


def established(node: ServingOutside, kind: int = SOCK_STREAM, *, v6: bool = False) -> Socket:
    """Return a connection in the flowtable."""
    client = node.connection(kind, v6=v6)
    wait_until("the connection is in the flowtable", lambda: is_forwarded(node, client))
    return client


@both_protocols
@families
def test_forward_sees_only_openings(node: ServingOutside, kind: int, v6: bool) -> None:
    """FORWARD sees only a connection's opening, and TCP's end."""
    assert passes(node, lambda: node.connection(kind, v6=v6).close()) > 0
    client = established(node, kind, v6=v6)
    assert passes(node, lambda: exchange(client)) == 0
    before = seen(node)
    client.close()
    if kind == SOCK_STREAM:
        wait_until("its end has passed FORWARD", lambda: seen(node) > before)


@both_protocols
def test_connections_live_through_restarts(node: ServingOutside, kind: int) -> None:
    """Connections continue after a kill or a stop, with the option and without."""
    client = established(node, kind)
    node.agent.stop(signal.SIGKILL)
    assert passes(node, lambda: exchange(client)) == 0, "while no agent runs too"
    for options, is_there in (((), False), (FAST, True)):
        node.agent.stop()
        node.agent.options = options
        node.agent.start()
        becomes(is_there)
        exchange(client)
        if not is_there:
            assert passes(node, lambda: exchange(client)) >= EXCHANGES
            assert not nft.exists(flowtable.TABLE)
    wait_until("it is in the flowtable again", lambda: is_forwarded(node, client))
    client.close()


# Not among the rules that --fast-forward=auto looks at, because of its name.
UNSEEN = f"""table inet ebpflb-test {{
    counter seen {{ }}
    chain c {{
        type filter hook forward priority 290
        meta l4proto tcp ct original proto-dst {NODEPORT} counter name seen
    }}
}}"""


@pytest.mark.parametrize(
    "rule",
    [f"add rule inet firewall forward tcp dport {TARGET} drop", POLICY],
    ids=["rule", "policy"],
)
def test_a_drop_that_appears_holds_for_open_connections(node: ServingOutside, rule: str) -> None:
    """With --fast-forward=auto a new drop applies to open connections within a second; the
    flowtable stays in use.
    """
    nodes.run("nft", "flush chain inet firewall forward")  # its counter acts on each packet
    nodes.run("nft", UNSEEN)
    node.agent.stop()
    node.agent.options = ("--fast-forward=auto",)
    node.agent.start()
    client = node.connection()
    wait_until("it passes no rule", lambda: unseen(lambda: goes_on(client)) == 0)
    nodes.run("nft", rule)
    client.settimeout(0.1)
    wait_until("it is dropped", lambda: not answers(client), seconds=1.5)
    assert has_flowtable()
    nodes.run("nft", "flush chain inet firewall forward")
    nodes.run("nft", "add chain inet firewall forward { policy accept; }")
    wait_until("it goes on", lambda: answers(client))
    client.close()
    nodes.run("nft", "delete table inet ebpflb-test")
    node.agent.stop()
    node.agent.options = FAST
    node.agent.start()


def answers(client: Socket) -> bool:
    try:
        return goes_on(client)
    except TimeoutError:
        return False


def unseen(done: Callable[[], object]) -> int:
    """Return how many packets pass the rules while the block runs."""
    before = counted()
    done()
    return counted() - before


def counted() -> int:
    said = json.loads(nodes.run("nft", "-j", "list", "counter", "inet", "ebpflb-test", "seen"))
    return int(said["nftables"][-1]["counter"]["packets"])


def becomes(is_there: bool) -> None:
    """Wait until the flowtable exists, or no longer exists."""
    wait_until("the flowtable is as chosen", lambda: has_flowtable() == is_there)


def has_flowtable() -> bool:
    return flowtable.read(flowtable.TABLE) is not None
