# SPDX-License-Identifier: Apache-2.0
"""The kernel's flowtable with --fast-forward on the engine netfilter.

From their 17th packet on, established connections bypass the stack; the packets that open and end
them do not, and no change of the flowtable breaks a connection. A counter in FORWARD counts the
packets of connections to the service. The client is outside.
"""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from socket import SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.entries.flows import Connection
from ebpflb.kernel.netfilter import conntrack, flowtable, nft
from ebpflb.kernel.node.sysctls import NETFILTER_SYSCTLS
from ebpflb.lab import traffic
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from tests.kernel.node import nodes
from tests.kit import firewall, needs
from tests.kit.cluster import NODEPORT, ServingOutside, endpoint, serving_outside, web
from tests.kit.on_removal import SOON, saying
from tests.kit.parameters import families
from tests.kit.sockets import CALL_SECONDS, Socket

FAST = ("--fast-forward=auto",)
EXCHANGES = 20
OFFLOAD = 1 << 14  # IPS_OFFLOAD
SECONDS = 1.5  # until a rule that appears counts
# Not among the rules that --fast-forward=auto looks at, because of its name.
COUNTED = "\n".join(
    f"meta l4proto {protocol} ct original proto-dst {NODEPORT} counter name seen"
    for protocol in ("tcp", "udp")
)
COUNTER = f"""table inet ebpflb-test {{
    counter seen {{ }}
    {firewall.chain("forward", "290", COUNTED)}
}}
"""

soon = partial(wait_until, seconds=60.0)
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
    with nodes.entered(fast.node.netns):
        fast.node.nft(COUNTER)
        fast.serve(*fast.web)
        soon("the flowtable is there", has_flowtable)
        yield fast
        fast.node.nft("delete table inet ebpflb-test")


def seen() -> int:
    """Return the packets in FORWARD so far, of connections to the NodePort."""
    said = json.loads(nodes.run("nft", "-j", "list", "counter", "inet", "ebpflb-test", "seen"))
    return int(said["nftables"][-1]["counter"]["packets"])


def goes_on(client: Socket) -> bool:
    client.send(b"still here")
    return bool(client.recv(64))


def answers(client: Socket) -> bool:
    """Whether it goes on within a moment."""
    client.settimeout(0.1)
    try:
        return goes_on(client)
    except TimeoutError:
        return False
    finally:
        client.settimeout(CALL_SECONDS)


def passes(done: Callable[[], object]) -> int:
    """Return how many packets pass FORWARD while the block runs."""
    before = seen()
    done()
    return seen() - before


def is_forwarded(client: Socket) -> bool:
    """Whether the connection continues without the stack."""
    return passes(lambda: goes_on(client)) == 0


def exchange(client: Socket) -> None:
    for _ in range(EXCHANGES):
        assert goes_on(client)


def established(node: ServingOutside, kind: int = SOCK_STREAM, *, v6: bool = False) -> Socket:
    """Return a connection in the flowtable."""
    client = node.connection(kind, v6=v6)
    soon("the connection is in the flowtable", lambda: is_forwarded(client))
    return client


@both_protocols
@families
def test_forward_sees_only_openings(node: ServingOutside, kind: int, v6: bool) -> None:
    """FORWARD sees only a connection's opening, and TCP's end."""
    assert passes(lambda: node.connection(kind, v6=v6).close()) > 0
    client = established(node, kind, v6=v6)
    assert passes(lambda: exchange(client)) == 0
    before = seen()
    client.close()
    if kind == SOCK_STREAM:
        soon("its end has passed FORWARD", lambda: seen() > before)


@both_protocols
def test_connections_live_through_restarts(node: ServingOutside, kind: int) -> None:
    """Connections continue after a kill or a stop, with the option and without."""
    client = established(node, kind)
    node.agent.stop(signal.SIGKILL)
    assert passes(lambda: exchange(client)) == 0, "while no agent runs too"
    for options, is_there in (((), False), (FAST, True)):
        node.agent.stop()
        node.agent.options = options
        node.agent.start()
        becomes(is_there)
        exchange(client)
        if not is_there:
            assert passes(lambda: exchange(client)) >= EXCHANGES
            assert not nft.exists(flowtable.TABLE)
    soon("it is in the flowtable again", lambda: is_forwarded(client))
    client.close()


HOOKS = {
    "raw": ("prerouting", "-300"),
    "mangle": ("prerouting", "-150"),
    "FORWARD": ("forward", "filter"),
}


@pytest.mark.parametrize("by", ["rule", "element", "policy"])
@pytest.mark.parametrize("at", HOOKS)
def test_a_ban(node: ServingOutside, at: str, by: str) -> None:
    """A rule, an element of a verdict map or a policy that drops, and appears, applies to open
    connections within a second. They go on when it goes.
    """
    hook, priority = HOOKS[at]
    client, chain = node.outside.v4, f"chain inet firewall {hook}"
    ban, lift = {
        "rule": (
            f"add rule inet firewall {hook} ip saddr {client} drop",
            f"flush {chain}",
        ),
        "element": (
            f"add element inet firewall bans {{ {client} : drop }}",
            f"delete element inet firewall bans {{ {client} : drop }}",
        ),
        "policy": (f"add {chain} {{ policy drop; }}", f"add {chain} {{ policy accept; }}"),
    }[by]
    text = f"""map bans {{ type ipv4_addr : verdict; }}
        {firewall.chain(hook, priority, "ip saddr vmap @bans")}
    """
    with firewall.rules(node.node, text):
        opened = established(node)
        nodes.run("nft", ban)
        soon("it is dropped", lambda: not answers(opened), seconds=SECONDS)
        nodes.run("nft", lift)
        soon("it goes on", lambda: answers(opened))
        opened.close()


def test_an_entry_that_is_deleted(node: ServingOutside) -> None:
    """A connection whose entry in conntrack is deleted goes on, and returns to the flowtable."""
    node.serve(node.web[0])
    client = established(node)
    conntrack.delete([entry_of(client)])
    soon("its entry is another one", lambda: answers(client) and not is_forwarded(client))
    soon("it is in the flowtable again", lambda: is_forwarded(client))
    client.close()


def entry_of(client: Socket) -> Connection:
    own = client.getsockname()[1]
    listed = conntrack.connections(lambda _, __, port: port == NODEPORT)
    return next(entry for entry in listed if entry.original.source_port == own)


@pytest.mark.parametrize("value", [None, SOON], ids=["drained", "reset"])
def test_an_endpoint_that_goes(node: ServingOutside, value: str | None) -> None:
    """Its TCP connection goes on, or is reset if the Service asks for that. A UDP flow gets
    another endpoint.
    """
    one, other, _ = node.web

    def serve(pod: Host) -> None:
        v6 = [endpoint(pod, v6=True)]
        node.publish(saying(web(endpoint(pod), v6=v6, nodeport=NODEPORT), value))

    serve(one)
    stream, flow = established(node), established(node, SOCK_DGRAM)
    serve(other)
    soon("the flow has another endpoint", lambda: asked(flow) == other.name)
    if value:
        soon("it is reset", lambda: is_reset(stream))
    else:
        exchange(stream)
    stream.close()
    flow.close()


def asked(client: Socket) -> str:
    """Who answers a datagram; "" if nobody does soon: with an entry goes an answer on its way."""
    client.settimeout(1)
    client.send(b"who are you?")
    with suppress(TimeoutError):
        return traffic.read(client.recv(64))[0]
    return ""


def is_reset(client: Socket) -> bool:
    try:
        return not answers(client)
    except ConnectionError:
        return True


@both_protocols
def test_ten_minutes_idle(node: ServingOutside, kind: int) -> None:
    """A flow that leaves the flowtable since it is idle has conntrack's timeout, and returns."""
    protocol = "tcp" if kind == SOCK_STREAM else "udp"
    timeout = NETFILTER_SYSCTLS / f"nf_flowtable_{protocol}_timeout"
    if not timeout.exists():
        pytest.skip("this kernel's flowtable has a timeout that cannot be set")
    former = timeout.read_text()
    timeout.write_text("1")
    client = established(node, kind)
    soon("it has left", lambda: not entry_of(client).status & OFFLOAD)
    assert entry_of(client).seconds > (600 if kind == SOCK_STREAM else 80)
    soon("it has returned", lambda: is_forwarded(client))
    timeout.write_text(former)
    client.close()


@both_protocols
def test_pods_that_come_and_go(node: ServingOutside, kind: int) -> None:
    """A connection loses nothing meanwhile, and is in the flowtable afterwards."""
    client = established(node, kind)
    for number in range(3):
        node.node.ip(
            f"link add come{number} type veth peer name gone{number}",
            f"link set come{number} master cni0 up",
        )
        soon("it is served", partial(has_device, f"come{number}"))
        exchange(client)
        node.node.ip(f"link delete come{number}")
        exchange(client)
        soon("it is in the flowtable", lambda: is_forwarded(client))
    client.close()


def has_device(name: str) -> bool:
    there = flowtable.read(flowtable.TABLE)
    return there is not None and name in there.devices


def becomes(is_there: bool) -> None:
    """Wait until the flowtable exists, or no longer exists."""
    soon("the flowtable is as chosen", lambda: has_flowtable() == is_there)


def has_flowtable() -> bool:
    return flowtable.read(flowtable.TABLE) is not None
