# SPDX-License-Identifier: Apache-2.0
"""The engine netfilter in operation: its table, and its flows for the operator.

The clients are outside: their packets are translated, not their sockets.
"""

import json
import subprocess
from collections.abc import Iterator
from socket import AF_INET, SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.kernel.netfilter import conntrack, nft
from ebpflb.kernel.netfilter.rules import TABLE
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Socket
from tests.kernel.node import nodes
from tests.kit import cluster, forked, needs
from tests.kit.cluster import NODEPORT, Cluster, endpoint, web

SOURCE = 12345  # the client's port, as `nc -u -p 12345`


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node whose agent was told to use netfilter, and a client outside."""
    needs.netfilter()
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


def connection(node: Cluster, kind: int = SOCK_STREAM) -> Socket:
    """A client's, which has been answered once."""
    client = node.sockets(outside(node)).open(AF_INET, kind)
    client.connect((node.node.v4, NODEPORT))
    if kind == SOCK_DGRAM:
        client.send(b"?")
    assert client.recv(64)
    return client


def goes_on(client: Socket) -> bool:
    client.send(b"still here")
    return b"still here" in client.recv(64)


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
    """`nft flush ruleset` while the agent runs: open connections and flows of datagrams go on, and
    new ones are served.
    """
    clients = [connection(node, kind) for kind in (SOCK_STREAM, SOCK_DGRAM)]
    node.node.nft("flush ruleset")
    assert all(map(goes_on, clients))
    wait_until("new connections are served", lambda: is_served(node))
    assert all(map(goes_on, clients))
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
    conntrack.delete(conntrack.connections(lambda *_: True))
    assert "stays" not in ebpflb(node, "cleanup")
    assert not nft.exists(TABLE)
    node.close_maps()
    node.agent.start()
    assert goes_on(connection(node))
