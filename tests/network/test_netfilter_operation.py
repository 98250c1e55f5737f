# SPDX-License-Identifier: Apache-2.0
"""The engine netfilter in operation: its table, its flows for the operator, and stale UDP flows.

The clients are outside: their packets are translated, not their sockets.
"""

import json
import signal
import subprocess
from collections.abc import Iterator
from socket import AF_INET, SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import CALL_SECONDS, Socket
from ebpflb.node import ctnetlink, nft
from ebpflb.node.netfilter_probe import netfilter_obstacle
from ebpflb.node.netfilter_rules import TABLE
from tests.kit import cluster, forked, requests
from tests.kit.cluster import NODEPORT, Cluster, endpoint, web
from tests.node import nodes

SOURCE = 12345  # the client's port, as `nc -u -p 12345`


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node whose agent was told to use netfilter, and a client outside."""
    if missing := netfilter_obstacle():
        pytest.skip(missing)
    options = ("--packet-path", "netfilter")
    with cluster.running(tmp_path_factory.mktemp("tracked"), *options) as made:
        made.outside = made.lab.outside("outside", 1)  # type: ignore[attr-defined]
        yield made


@pytest.fixture
def node(tracked: Cluster) -> Iterator[Cluster]:
    """The test's thread is in the node's namespace."""
    with nodes.entered(tracked.node.netns):
        tracked.publish(serve(*tracked.web))
        yield tracked


def serve(*pods: Host) -> list[Manifest]:
    v6 = [endpoint(pod, v6=True) for pod in pods]
    return web(*map(endpoint, pods), v6=v6, nodeport=NODEPORT)


def outside(node: Cluster) -> Host:
    found: Host = node.outside  # type: ignore[attr-defined]
    return found


def ebpflb(node: Cluster, *words: str) -> str:
    """What a command on the node says that needs all directories of the agent."""
    return _run(node, *words, *node.agent.where)


def flows(node: Cluster, *words: str) -> str:
    """What `ebpflb flows` says on the node."""
    return _run(node, "flows", *words, "--state-dir", str(node.agent.paths.state))


def _run(node: Cluster, *words: str) -> str:
    return forked.run(*words, netns=node.node.netns).stdout


def connection(node: Cluster) -> Socket:
    """A client's, which has been answered once."""
    client = node.sockets(outside(node)).open(AF_INET, SOCK_STREAM)
    client.connect((node.node.v4, NODEPORT))
    assert client.recv(64)
    return client


def goes_on(client: Socket) -> bool:
    client.send(b"still here")
    return bool(client.recv(64) == b"still here")


@pytest.mark.extended
def test_flows_are_listed_with_names_and_flushed(node: Cluster) -> None:
    """A row has the client, the service, and the pod that conntrack sends it to; flush ends it."""
    client = connection(node)
    only = ("--client", outside(node).v4)
    rows = json.loads(flows(node, "list", *only, "-o", "json"))
    (row,) = [each for each in rows if each["client"].endswith(f":{client.getsockname()[1]}")]
    assert (row["engine"], row["state"], row["protocol"]) == ("netfilter", "open", "TCP")
    assert (row["service"], row["frontend"]) == (
        "default/web:tcp/TCP",
        f"{node.node.v4}:{NODEPORT}",
    )
    assert row["pod"] in {pod.name for pod in node.web}
    assert "netfilter" in ebpflb(node, "status")
    assert "flows flushed" in flows(node, "flush", *only)
    assert json.loads(flows(node, "list", *only, "-o", "json")) == []


def test_a_flush_of_all_rules_harms_nothing(node: Cluster) -> None:
    """`nft flush ruleset` while the agent runs: open connections go on, and new ones are served."""
    client = connection(node)
    node.node.nft("flush ruleset")
    assert goes_on(client)
    wait_until("new connections are served", lambda: is_served(node))
    assert goes_on(client)
    assert nft.exists(TABLE)
    assert "netfilter table" not in ebpflb(node, "status")


def is_served(node: Cluster) -> bool:
    """Where the agent does not own the table, new connections fail until it is put back."""
    try:
        return goes_on(connection(node))
    except ConnectionRefusedError:
        return False


def test_others_cannot_change_the_table(node: Cluster) -> None:
    """As long as an agent runs; before Linux 6.9 it puts back what they remove."""
    words = [*node.node.enter, "nft", "delete", "table", "inet", "ebpflb"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        assert "Operation not permitted" in done.stderr
        return
    said = "put back what another program had removed"
    wait_until("the log says so", lambda: said in node.agent.log())
    wait_until("the table is there again", lambda: nft.exists(TABLE))


def test_no_connection_ends_or_fails_while_no_agent_runs(node: Cluster) -> None:
    """The table stays when the agent is killed, and the next agent finds it."""
    client = connection(node)
    node.agent.stop(signal.SIGKILL)
    assert nft.exists(TABLE)
    assert goes_on(client)
    assert goes_on(connection(node))
    node.agent.start()
    assert goes_on(client)
    assert goes_on(connection(node))


@pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
def test_udp_is_preserved_when_the_server_pod_cycles(node: Cluster, v6: bool) -> None:
    """A client that keeps its port reaches the new pod; that of a serving pod is left alone."""
    one, other, third = node.web
    address = node.node.v6 if v6 else node.node.v4
    sockets = node.sockets(outside(node))
    node.publish(serve(one))
    client = sockets.open(requests.family_of(address), SOCK_DGRAM)
    client.bind(("::" if v6 else "0.0.0.0", SOURCE))
    assert ask(client, address, CALL_SECONDS) == one.name
    node.publish(serve(one, other))
    for _ in range(5):
        assert ask(client, address, CALL_SECONDS) == one.name, "it serves on"
    node.publish(serve(other))
    wait_until("its entry is deleted", lambda: ask(client, address) == other.name)
    node.publish(serve())
    node.publish(serve(third))
    wait_until("after a while without endpoints", lambda: ask(client, address) == third.name)
    client.close()


def ask(client: Socket, address: str, seconds: float = 0.5) -> str:
    """Who answers in so many seconds; "" if nobody does."""
    client.settimeout(seconds)
    try:
        client.sendto(b"?", (address, NODEPORT))
        said: bytes = client.recv(64)
    except OSError:
        return ""
    return said.split()[0].decode()


def test_cleanup_leaves_what_open_connections_need(node: Cluster) -> None:
    """Without ebpflb they go on, new ones are refused; when they have ended the table goes too."""
    client = connection(node)
    node.agent.stop()
    assert "table inet ebpflb stays as long as" in ebpflb(node, "cleanup")
    assert goes_on(client)
    fresh = node.sockets(outside(node)).open(AF_INET, SOCK_STREAM)
    with pytest.raises(ConnectionRefusedError):
        fresh.connect((node.node.v4, NODEPORT))
    assert goes_on(client)
    client.close()
    ctnetlink.delete(ctnetlink.connections(lambda *_: True))
    assert "stays" not in ebpflb(node, "cleanup")
    assert not nft.exists(TABLE)
    node.close_maps()
    node.agent.start()
    assert goes_on(connection(node))
